"""The files in deploy/: valid against the schemas of whoever reads them, and about things that exist."""

import importlib
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_DEPLOY = _ROOT / "deploy"


def module(name, package):
    try:
        return importlib.import_module(name)
    except ImportError:
        pytest.skip(f"there is no {name}: pip install {package}")


def documents(name):
    return [*module("yaml", "pyyaml").safe_load_all((_DEPLOY / name).read_text())]


def test_the_service_and_the_indexed_job_fit_kubernetes_schemas():
    validate = module("kubernetes_validate", "kubernetes-validate")
    found = documents("indexed-job.yaml")
    assert [one["kind"] for one in found] == ["Service", "NetworkPolicy", "Job"]
    for one in found:
        validate.validate(one, validate.latest_version(), strict=True)


def test_the_validator_would_notice_a_misspelt_field():
    validate = module("kubernetes_validate", "kubernetes-validate")
    *_, job = documents("indexed-job.yaml")
    job["spec"]["completionmode"] = job["spec"].pop("completionMode")
    with pytest.raises(validate.ValidationError):
        validate.validate(job, validate.latest_version(), strict=True)


def test_the_pods_of_the_indexed_job_find_the_first_by_its_name():
    service, _, job = documents("indexed-job.yaml")
    name, pods = job["metadata"]["name"], job["spec"]["template"]["spec"]
    [container] = pods["containers"]
    assert service["spec"]["selector"] == {"job-name": name} and service["spec"]["clusterIP"] == "None"
    assert f"--master-addr={name}-0.{service['metadata']['name']} " in container["command"][-1]
    assert pods["subdomain"] == service["metadata"]["name"]
    assert f"--nnodes={job['spec']['completions']} " in container["command"][-1]
    assert job["spec"]["parallelism"] == job["spec"]["completions"]
    assert f"--nproc-per-node={container['resources']['limits']['nvidia.com/gpu']} " in container["command"][-1]


@pytest.mark.parametrize("kind", ["TrainingRuntime", "TrainJob"])
def test_the_kubeflow_documents_fit_the_trainers_models(kind):
    models = module("kubeflow_trainer_api.models", "kubeflow-trainer-api")
    [one] = [document for document in documents("kubeflow-trainjob.yaml") if document["kind"] == kind]
    model = getattr(models, f"TrainerV1alpha1{kind}")
    # The models drop what they do not know: what comes back must be all that was given.
    assert model.from_dict(one).to_dict() == one
    one["spec"]["nodes"] = 2
    assert model.from_dict(one).to_dict() != one


def test_the_trainjob_names_its_runtime():
    _, runtime, job = documents("kubeflow-trainjob.yaml")
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert job["spec"]["runtimeRef"]["kind"] == runtime["kind"]
    assert (
        job["spec"]["trainer"]["numProcPerNode"]
        == job["spec"]["trainer"]["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
    )


def pod_of(name):
    if name == "indexed-job.yaml":
        return documents(name)[-1]["spec"]["template"]["spec"]
    [job] = documents(name)[1]["spec"]["template"]["spec"]["replicatedJobs"]
    return job["template"]["spec"]["template"]["spec"]


@pytest.mark.parametrize("name", ["indexed-job.yaml", "kubeflow-trainjob.yaml"])
def test_pods_run_without_privileges_and_are_reached_by_the_pods_of_their_job_only(name):
    pod = pod_of(name)
    assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"]
    assert f"--uid {pod['securityContext']['runAsUser']} " in (_ROOT / "Dockerfile").read_text()
    [container] = pod["containers"]
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    [policy] = [document for document in documents(name) if document["kind"] == "NetworkPolicy"]
    pods = policy["spec"]["podSelector"]
    assert pods["matchLabels"] and policy["spec"]["policyTypes"] == ["Ingress"]
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": pods}]}]


def test_the_image_contains_no_host_key():
    steps = re.split(r"\n(?=[A-Z])", (_ROOT / "Dockerfile").read_text())
    [installs] = [step for step in steps if "openssh-server" in step and step.startswith("RUN")]
    assert "rm -f /etc/ssh/ssh_host_*" in installs, "in the same layer: a later one would only hide them"


@pytest.mark.ranks
def test_each_container_makes_a_host_key_of_its_own(tmp_path):
    if not Path("/usr/sbin/sshd").exists():
        pytest.skip("there is no sshd: apt install openssh-server")
    keys = []
    for name in ("one", "two", "one"):
        home = tmp_path / name
        home.mkdir(exist_ok=True)
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
        server = subprocess.Popen(
            [_DEPLOY / "sshd.sh", str(port)], env={**os.environ, "HOME": str(home)}, stdout=subprocess.PIPE, text=True
        )
        try:
            keys.append(server.stdout.readline())
        finally:
            server.kill()
            server.communicate()
        assert (home / ".megaclass-sshd/ssh_host_ed25519_key").stat().st_mode & 0o777 == 0o600
    assert all(key.startswith("host key: ssh-ed25519 ") for key in keys)
    assert keys[0] == keys[2] != keys[1]


@pytest.mark.parametrize("name", ["indexed-job.yaml", "kubeflow-trainjob.yaml", "skypilot.yaml", "slurm.sbatch"])
def test_recipes_that_are_named_are_there(name):
    for recipe in re.findall(r"recipes/[a-z0-9.-]+\.toml", (_DEPLOY / name).read_text()):
        assert (_ROOT / recipe).is_file(), recipe


@pytest.mark.ranks
def test_shell_texts_can_be_parsed(tmp_path):
    [sky] = documents("skypilot.yaml")
    *_, job = documents("indexed-job.yaml")
    scripts = [sky["setup"], sky["run"], job["spec"]["template"]["spec"]["containers"][0]["command"][-1]]
    for script in [*scripts, (_DEPLOY / "slurm.sbatch").read_text()]:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


# ---- SkyPilot ----

# Of its reference of the task's fields (docs.skypilot.co, "SkyPilot YAML"): those we use, and the type of each.
_SKYPILOT_FIELDS = {
    "name": str,
    "num_nodes": int,
    "resources": dict,
    "workdir": str,
    "file_mounts": dict,
    "volumes": dict,
    "setup": str,
    "run": str,
}
_SKYPILOT_RESOURCES = {"infra", "accelerators", "cpus", "memory", "disk_size", "disk_tier", "use_spot", "image_id"}
_SKYPILOT_MODES = {"MOUNT", "COPY", "MOUNT_CACHED"}
_SKYPILOT_VARIABLES = {
    *("SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS", "SKYPILOT_NUM_NODES"),
    *("SKYPILOT_NUM_GPUS_PER_NODE", "SKYPILOT_TASK_ID"),
}


def test_the_skypilot_task_has_fields_modes_and_variables_that_skypilot_knows():
    [task] = documents("skypilot.yaml")
    assert {name: type(value) for name, value in task.items()} == _SKYPILOT_FIELDS
    assert task["resources"].keys() <= _SKYPILOT_RESOURCES
    assert re.fullmatch(r"[A-Z0-9]+:[1-9][0-9]*", task["resources"]["accelerators"])
    for path, mount in task["file_mounts"].items():
        assert path.startswith("/") and mount.keys() == {"source", "mode"} and mount["mode"] in _SKYPILOT_MODES
    assert set(re.findall(r"SKYPILOT_[A-Z_]+", task["setup"] + task["run"])) <= _SKYPILOT_VARIABLES


def test_the_run_folder_of_the_skypilot_task_is_a_volume_and_no_bucket():
    [task] = documents("skypilot.yaml")
    [run_dir] = re.findall(r"train\.run_dir=(/[a-z]+)/", task["run"])
    [data] = re.findall(r"data\.path=(/[a-z]+)/", task["run"])
    assert run_dir in task["volumes"] and data in task["file_mounts"]


@pytest.mark.ranks
def test_skypilot_itself_reads_the_task():
    sky = module("sky", "skypilot")
    task = sky.Task.from_yaml(str(_DEPLOY / "skypilot.yaml"))
    assert task.num_nodes == 2


# ---- what stands in them is run ----

_RECIPE = """
[data]
path = "replaced by the command"
size = 32
[backbone]
name = "slim"
embedding_dim = 16
[train]
epochs = 1
global_batch = 32
[export]
onnx = false
"""
# Stands in for `megaclass train` where a training would load torch on two hosts only to show once more that it trains.
_STAND_IN = """
import os, socket, sys
from megaclass.cli.main import main
from megaclass_launch.rendezvous.rank0_address import meeting_point
from megaclass_launch.world import world_from_environment
world = meeting_point(world_from_environment())
# torchrun's own store listens there until its ranks have ended.
socket.create_connection((world.address, world.port), timeout=60).close()
print(f"rank {world.rank} of {world.size} on {os.uname().nodename}: restart {os.environ['MEGACLASS_RESTART']}", flush=True)
sys.exit(main([*sys.argv[1:], "--show-config"]))
"""


def plain_values(variables):
    """The variables without the job's secret, which Kubernetes fills in."""
    found = {one["name"]: one.get("value") or one["valueFrom"] for one in variables}
    assert found.pop("MEGACLASS_JOB_SECRET") == {"secretKeyRef": {"name": "megaclass", "key": "job-secret"}}
    return found


def indexed_job(node, nodes):
    [container] = documents("indexed-job.yaml")[-1]["spec"]["template"]["spec"]["containers"]
    env = plain_values(container["env"]) | {"JOB_COMPLETION_INDEX": str(node)}
    return shlex.join(container["command"]), env


def kubeflow(node, nodes):
    """The trainer tells torchrun by variables what stands in the job."""
    trainer = documents("kubeflow-trainjob.yaml")[-1]["spec"]["trainer"]
    env = plain_values(trainer["env"])
    env |= {"PET_NNODES": str(trainer["numNodes"]), "PET_NODE_RANK": str(node), "PET_NPROC_PER_NODE": "1"}
    env |= {"PET_MASTER_ADDR": nodes[0], "PET_MASTER_PORT": "29500"}
    return shlex.join([*trainer["command"], *trainer["args"]]), env


def skypilot(node, nodes):
    env = {"SKYPILOT_NODE_RANK": str(node), "SKYPILOT_NODE_IPS": "\n".join(nodes)}
    env |= {"SKYPILOT_NUM_NODES": str(len(nodes)), "SKYPILOT_NUM_GPUS_PER_NODE": "1"}
    return documents("skypilot.yaml")[0]["run"], env


def run_on_two_hosts(bed, tmp_path, recipe, command="-m megaclass"):
    """Runs the command of a recipe on two hosts, with `command` instead of `-m megaclass`; returns what they printed."""
    (tmp_path / "tiny.toml").write_text(_RECIPE)
    names = tmp_path / "hosts"
    names.write_text((bed.folder / "hosts").read_text() + "10.123.0.1 megaclass-0.megaclass\n")
    nodes = ["10.123.0.1", "10.123.0.2"]
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MEGACLASS_", "PET_", "RANK"))}
    plain |= {"PATH": f"{Path(sys.executable).parent}:{plain['PATH']}", "OMP_NUM_THREADS": "1"}
    logs = [tmp_path / f"log-{node}" for node in range(2)]
    processes = []
    for node, log in enumerate(logs):
        text, env = recipe(node, nodes)
        # What a test has less of: GPUs, and the data of the recipe.
        text = re.sub(r"--nproc-per-node=8", "--nproc-per-node=1", text)
        text = text.replace("recipes/ms1mv3-r50-arcface.toml", f"{tmp_path}/tiny.toml")
        text = text.replace("/data/ms1mv3", "synthetic:20x160").replace("/runs/ms1mv3-r50", f"{tmp_path}/run")
        assert "-m megaclass train " in text
        text = text.replace("-m megaclass train ", f"{command} train ")
        shell = ["unshare", "--mount", "bash", "-c", f"mount --bind {names} /etc/hosts\n{text}"]
        with log.open("wb") as out:
            command_there = bed.inside(f"h{node + 1}", *shell)
            processes.append(
                subprocess.Popen(
                    command_there, env=plain | env, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
                )
            )
    deadline = time.monotonic() + 200
    codes = [process.wait(max(1.0, deadline - time.monotonic())) for process in processes]
    # Whole: one warning of torchrun's store, with its stack in C++, is longer than all that the ranks print.
    story = "\n".join(log.read_text() for log in logs)
    assert codes == [0, 0], story
    assert "rank 0 of 2 on h1: " in story and "rank 1 of 2 on h2: " in story, story
    return story


def test_the_command_of_a_recipe_trains_on_two_hosts(bed, tmp_path):
    story = run_on_two_hosts(bed, tmp_path, kubeflow)
    assert (tmp_path / "run" / "summary.json").is_file(), story


@pytest.mark.parametrize("recipe", [indexed_job, skypilot], ids=lambda recipe: recipe.__name__)
def test_the_command_of_each_other_recipe_starts_ranks_on_two_hosts_that_meet_and_know_the_run(bed, tmp_path, recipe):
    (tmp_path / "stand_in.py").write_text(_STAND_IN)
    story = run_on_two_hosts(bed, tmp_path, recipe, str(tmp_path / "stand_in.py"))
    assert story.count(": restart 1\n") == 2, story
    assert story.count(f'run_dir = "{tmp_path}/run"') == 2 and story.count('path = "synthetic:20x160"') == 2, story
