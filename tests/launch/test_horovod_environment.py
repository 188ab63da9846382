"""What ranks find in their environment with --horovod: horovodrun's variables, and nothing that looks like torchrun."""

import importlib.util
import sys

import pytest
from tests.conftest import free_port

TORCHRUNS = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"]
HOROVODRUNS = [
    *("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE", "HOROVOD_CROSS_RANK"),
    *("HOROVOD_CROSS_SIZE", "HOROVOD_HOSTNAME", "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_CONTROLLER"),
    *("HOROVOD_GLOO_IFACE", "NCCL_SOCKET_IFNAME", "PYTHONUNBUFFERED"),
]
PRINTS = f"""
import os
rank = int(os.environ["HOROVOD_RANK"])
print([name for name in {TORCHRUNS} if name in os.environ], *[os.environ.get(name) for name in {HOROVODRUNS}])
from megaclass_launch.world import world_from_environment
world = world_from_environment()
assert (world.rank, world.size, world.local_rank, world.local_size) == (rank, 2, rank, 2), world
assert str(world.port) == os.environ["MEGACLASS_STORE_PORT"] and world.starter == "megaclass-run", world
"""


@pytest.fixture
def python(tmp_path):
    """python(body): a command that runs the body."""

    def command(body: str) -> list[str]:
        file = tmp_path / "script.py"
        file.write_text(body)
        return [sys.executable, str(file)]

    return command


def test_horovodruns_variables_are_set_and_torchruns_are_not(run, python):
    left_over = dict.fromkeys(TORCHRUNS, "7")  # from a starter around this one
    done = run("--horovod", "-np", "2", *python(PRINTS), env=left_over)
    assert done.code == 0, done.story()
    assert sorted(done.out.splitlines()) == [
        "[0]<stdout>:[] 0 2 0 2 0 1 localhost 127.0.0.1 gloo lo lo 1",
        "[1]<stdout>:[] 1 2 1 2 0 1 localhost 127.0.0.1 gloo lo lo 1",
    ], done.story()


def test_what_the_user_gives_is_there_and_torchruns_names_are_not(run):
    done = run("--horovod", "-np", "1", "-x", "MASTER_PORT=1234", "sh", "-c", "echo $MASTER_PORT $RANK")
    assert done.out.splitlines() == ["[0]<stdout>:1234"], done.story()


def test_a_job_without_horovods_names_has_torchruns_within_one_that_has_them(run):
    inner = "megaclass run -np 1 sh -c 'echo $RANK $WORLD_SIZE $MASTER_ADDR $MEGACLASS_PORT .'"
    done = run("--horovod", "-np", "1", "sh", "-c", inner)
    assert done.out == "[0]<stdout>:[0]<stdout>:0 1 127.0.0.1 .\n", done.story()


LIBRARIES = {
    "webdataset": """
    from webdataset.utils import pytorch_worker_info
    assert pytorch_worker_info()[:2] == (0, 1), pytorch_worker_info()
""",
    "lightning": """
    from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment
    assert not TorchElasticEnvironment.detect() and not LightningEnvironment().creates_processes_externally
    from lightning.pytorch import Trainer
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    assert (trainer.world_size, trainer.global_rank) == (1, 0)
""",
    "accelerate": """
    from accelerate import PartialState
    assert PartialState(cpu=True).num_processes == 1
""",
}


def test_libraries_behave_as_without_torchrun(run, python):
    """They see one process, as under horovodrun, while Horovod's API sees two.

    The second rank loads them: the first one would have number 0 in any case.
    """
    installed = [name for name in LIBRARIES if importlib.util.find_spec(name)]
    if not installed:
        pytest.skip(f"there is none of {', '.join(LIBRARIES)}: pip install {' '.join(LIBRARIES)}")
    checks = "".join(f"{LIBRARIES[name]}    print('{name} as alone')\n" for name in installed)
    body = f"""
import os, torch, horovod.torch as hvd
if os.environ["HOROVOD_RANK"] == "1":{checks}
hvd.init()
assert hvd.allreduce(torch.tensor(hvd.rank() + 1), op=hvd.Sum) == 3
print("hvd as two")
"""
    done = run("--horovod", "-np", "2", *python(body), timeout_s=120)
    assert done.code == 0, done.story()
    for line in ("[0]<stdout>:hvd as two", "[1]<stdout>:hvd as two", *(f"[1]<stdout>:{n} as alone" for n in installed)):
        assert line in done.out.splitlines(), done.story()


def test_a_script_may_set_torchruns_names_for_a_process_group_of_its_own(run, python):
    body = """
import os, sys, torch, horovod.torch as hvd
mine = {"RANK": "HOROVOD_RANK", "WORLD_SIZE": "HOROVOD_SIZE"}
os.environ.update({name: os.environ[theirs] for name, theirs in mine.items()}, MASTER_ADDR="127.0.0.1")
os.environ["MASTER_PORT"] = sys.argv[1]
hvd.init()
assert (hvd.rank(), hvd.size(), hvd.allreduce(torch.ones(1), op=hvd.Sum).item()) == (int(os.environ["RANK"]), 2, 2.0)
"""
    done = run("--horovod", "-np", "2", *python(body), str(free_port()), timeout_s=120)
    assert done.code == 0, done.story()
