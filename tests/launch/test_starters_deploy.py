"""The files in deploy/: valid against the schemas of whoever reads them, and about things that exist."""

import importlib
import re
import subprocess
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
    assert [one["kind"] for one in found] == ["Service", "Job"]
    for one in found:
        validate.validate(one, validate.latest_version(), strict=True)


def test_the_validator_would_notice_a_misspelt_field():
    validate = module("kubernetes_validate", "kubernetes-validate")
    _, job = documents("indexed-job.yaml")
    job["spec"]["completionmode"] = job["spec"].pop("completionMode")
    with pytest.raises(validate.ValidationError):
        validate.validate(job, validate.latest_version(), strict=True)


def test_the_pods_of_the_indexed_job_find_the_first_by_its_name():
    service, job = documents("indexed-job.yaml")
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
    runtime, job = documents("kubeflow-trainjob.yaml")
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert job["spec"]["runtimeRef"]["kind"] == runtime["kind"]
    assert (
        job["spec"]["trainer"]["numProcPerNode"]
        == job["spec"]["trainer"]["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
    )


@pytest.mark.parametrize("name", ["indexed-job.yaml", "kubeflow-trainjob.yaml", "skypilot.yaml", "slurm.sbatch"])
def test_recipes_that_are_named_are_there(name):
    for recipe in re.findall(r"recipes/[a-z0-9.-]+\.toml", (_DEPLOY / name).read_text()):
        assert (_ROOT / recipe).is_file(), recipe


def test_shell_texts_can_be_parsed(tmp_path):
    [sky] = documents("skypilot.yaml")
    _, job = documents("indexed-job.yaml")
    scripts = [sky["setup"], sky["run"], job["spec"]["template"]["spec"]["containers"][0]["command"][-1]]
    for script in [*scripts, (_DEPLOY / "slurm.sbatch").read_text()]:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
