"""`megaclass train` in an elastic job: ranks die and join, and the run ends like one that was never disturbed."""

import json
import os
import re
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.launch.conftest import wait_until
from tests.launch.counting_backbone import lost_and_repeated

from megaclass.config.read import load_config
from megaclass.training.rank_main import RankContext, train_in_group
from megaclass.training.start.restart import FolderLock, StartMode
from megaclass_launch.events_file import read_events
from megaclass_launch.ranks.process_group import process_group
from megaclass_launch.world import World

HERE = Path(__file__).parent
RECIPE = HERE.parents[1] / "recipes" / "demo.toml"
NUM_IMAGES, STEPS_PER_EPOCH, NUM_STEPS = 96, 6, 36
SETTINGS = (
    *("synth.identities=0", f"data.path=synthetic:12x{NUM_IMAGES}@32", "data.mirror=false"),
    *("backbone.name=counting_backbone:CountingNet", "backbone.embedding_dim=16", "backbone.batch_norm=sync"),
    *("head.margin=adaface", "head.margin_size=0.1", "head.scale=16", "head.sample_rate=0.5", "train.ema=0.9"),
    *("train.global_batch=16", "train.epochs=6", "train.report_steps=1", "export.onnx=false"),
    # The test itself holds all ranks back for as long as new ones take to start.
    "train.hang_after_s=0",
    *("train.commit_steps=5", "train.checkpoint_epochs=2", "train.nproc=1", "optimizer.lr=0.0003"),
)


def rows_of(folder: Path) -> list[list]:
    """What the processes have written down: generation, step, rank, number of ranks, images."""
    lines = [line for file in folder.glob("seen-*") for line in file.read_text().splitlines()]
    return sorted(json.loads(line) for line in lines)


def losses_of(run_dir: Path) -> list[tuple[int, float]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"]) for row in rows]


@pytest.fixture
def undisturbed(tmp_path, monkeypatch):
    """The losses of one process, this one, which trains and neither evaluates nor reports."""
    monkeypatch.syspath_prepend(str(HERE))
    (tmp_path / "count").mkdir()
    monkeypatch.setenv("COUNT_DIR", str(tmp_path / "count"))
    settings = [*SETTINGS, f"train.run_dir={tmp_path / 'undisturbed'}"]
    config, world = load_config(RECIPE, settings), World(starter="tests")
    with process_group(world, device="cpu") as device, ExitStack() as held:
        train_in_group(RankContext(config=config, world=world, mode=StartMode(), lock=FolderLock(held)), device)
    for file in (tmp_path / "count").iterdir():
        file.unlink()
    return losses_of(tmp_path / "undisturbed")


@pytest.mark.ranks
def test_ranks_die_and_join_and_the_run_ends_like_one_never_disturbed(run, tmp_path, undisturbed):
    """Rank 0 is killed; a host with other settings is refused; two ranks join; a rank and the one with its copy are killed."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.read_text())
    count, run_dir, hosts = tmp_path / "count", tmp_path / "run", tmp_path / "hosts"
    hosts.write_text("localhost slots=3\n")
    for step in (17, 21, 28):
        (count / f"hold-{step}").touch()
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    options = ("--min-np", "1", "--max-np", "4", "--verbose", "--hostfile", str(hosts))
    train = (sys.executable, "-m", "megaclass", "train", str(recipe), *SETTINGS, f"train.run_dir={run_dir}")
    job = run.start(*options, *train, env={"COUNT_DIR": str(count), "PYTHONPATH": path})

    def arrive_at(step: int, generation: int, size: int) -> dict[int, int]:
        """Waits until all ranks hold before a step; returns their processes by rank."""

        def processes() -> dict[int, int]:
            found = {}
            for file in count.glob("seen-*"):
                for line in file.read_text().splitlines():
                    if json.loads(line)[:2] == [generation, step]:
                        found[json.loads(line)[2]] = int(file.name.removeprefix("seen-"))
            return found

        wait_until(lambda: len(processes()) == size or job.process.poll() is not None, 120, job.story)
        assert job.process.poll() is None, job.story()
        return processes()

    first = arrive_at(17, 1, 3)
    os.kill(first[0], signal.SIGKILL)
    job.says(f"rank 0 on localhost (pid {first[0]}) ended with signal SIGKILL; 2 rank(s) continue.")
    (count / "hold-17").unlink()
    # Rank 0 had written the metrics and held the folder's lock; its centres are on another rank.
    second = arrive_at(21, 2, 2)
    assert second == {0: first[1], 1: first[2]}
    job.says("generation 2: 2 ranks on localhost:2; before: 3.")
    job.says("generation 2 trains")
    recipe.write_text(RECIPE.read_text().replace("weight_decay = 5e-4", "weight_decay = 5e-3"))
    hosts.write_text("localhost slots=3\n127.0.0.2 slots=1\n")
    job.says("head.weight_decay is 0.0005 there and 0.005 here.", timeout_s=90)
    job.says("ended with exit code 2; 2 rank(s) continue. 127.0.0.2 gets no new ranks")
    recipe.write_text(RECIPE.read_text())
    hosts.write_text("localhost slots=3\n127.0.0.1 slots=2\n")
    job.says("127.0.0.1:2 was added; new ranks there join at the next commit.")
    job.says("is ready (start)", 5, timeout_s=90)
    (count / "hold-21").unlink()
    third = arrive_at(28, 3, 4)
    assert (third[0], third[1]) == (first[1], first[2])
    # Copies are on another host where there is one: that of rank 1 is on rank 3.
    for rank in (1, 3):
        os.kill(third[rank], signal.SIGKILL)
    job.says("ended with signal SIGKILL", 3)
    (count / "hold-28").unlink()
    assert job.wait(150) == 0, job.story()
    assert (
        "WARNING megaclass: a rank and the rank that held the copy of its centres are lost: going back from step 28 to the "
        "checkpoint of step 24." in job.err
    )

    # Every step is in the curve once, and the curve is the undisturbed one: other ranks add in another order.
    losses = losses_of(run_dir)
    assert [step for step, _ in losses] == list(range(1, NUM_STEPS + 1))
    assert losses == [(step, pytest.approx(loss, rel=1e-4)) for step, loss in undisturbed]
    # Of a step that was done again, the last time counts. Every image was trained on once per epoch.
    assert lost_and_repeated(count, NUM_IMAGES, STEPS_PER_EPOCH, NUM_STEPS // STEPS_PER_EPOCH) == (0, 0)
    rows = rows_of(count)
    # Only steps since the last commit, and since the last checkpoint where the copy was lost, too, were done again.
    begins = {generation: min(row[1] for row in rows if row[0] == generation) for generation in (1, 2, 3, 4)}
    assert begins == {1: 0, 2: 15, 3: begins[3], 4: 24} and begins[3] in (24, 25)
    assert {(row[0], row[3]) for row in rows} == {(1, 3), (2, 2), (3, 4), (4, 2)}

    changes = [event for event in read_events(run_dir)[0] if event["event"] == "rank_change"]
    fields = ("step", "before", "after", "lost_ranks", "undone_steps", "generation")
    assert [tuple(change[name] for name in fields) for change in changes] == [
        (15, 3, 2, [0], 2, 2),
        (begins[3], 2, 4, [], 0, 3),
        (24, 4, 2, [1, 3], 4, 4),
    ]
    page = (run_dir / "report.html").read_text()
    assert page.count("rank_change") == 3 and re.search(r"before 4, after 2, lost_ranks \[1, 3\]", page)


@pytest.mark.ranks
@pytest.mark.parametrize("step", [3, 14])
def test_a_job_whose_state_is_lost_continues_from_a_checkpoint_and_never_starts_again_in_silence(run, tmp_path, step):
    """The only rank that holds the state is killed while another one joins, before and after the first checkpoint (step 12)."""
    count, run_dir, hosts = tmp_path / "count", tmp_path / "run", tmp_path / "hosts"
    count.mkdir()
    hosts.write_text("localhost slots=1\n")
    (count / f"hold-{step}").touch()
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    options = ("--min-np", "1", "--max-np", "2", "--verbose", "--hostfile", str(hosts))
    train = (
        sys.executable,
        "-m",
        "megaclass",
        "train",
        str(RECIPE),
        *SETTINGS,
        f"train.run_dir={run_dir}",
        "--overwrite",
    )
    job = run.start(*options, *train, env={"COUNT_DIR": str(count), "PYTHONPATH": path})
    job.says("rank 0 of 1 from epoch ?, step 0", timeout_s=90)
    wait_until(lambda: any(row[1] == step for row in rows_of(count)), 90, job.story)
    (count / "hold-build").touch()
    hosts.write_text("localhost slots=1\n127.0.0.1 slots=1\n")
    job.says("is ready (start)", 2, timeout_s=90)
    (count / f"hold-{step}").unlink()
    job.says("builds in generation 2", 2, timeout_s=90)
    (old,) = {int(pid) for pid in re.findall(r"pid (\d+) rank 0 of 1", job.out)}
    os.kill(old, signal.SIGKILL)
    job.says(f"(pid {old}) ended with signal SIGKILL; 1 rank(s) continue.")
    (count / "hold-build").unlink()
    if step < 12:
        assert job.wait(90) == 2, job.story()
        assert "the run folder holds no checkpoint. The job does not start again at step 0 by itself" in job.err, (
            job.story()
        )
        return
    assert job.wait(120) == 0, job.story()
    assert "the others had not received it yet: continuing from the checkpoint of step 12." in job.err, job.story()
    assert [step for step, _ in losses_of(run_dir)] == list(range(1, NUM_STEPS + 1))


@pytest.mark.hosts
@pytest.mark.soak
def test_a_training_survives_a_cut_cable_and_a_dead_host(bed, tmp_path):
    hosts, count, num_epochs = tmp_path / "hosts", tmp_path / "count", 120
    count.mkdir()
    hosts.write_text("h1:1\nh2:1\nh3:1\n")
    options = ["--min-np", "1", "--heartbeat", "6", "--blacklist-cooldown-range", "2", "3", "--start-timeout", "60"]
    for variable in (f"COUNT_DIR={count}", f"PYTHONPATH={HERE}", "COUNT_STEP_S=0.1", "OMP_NUM_THREADS=1"):
        options += ["-x", variable]
    places = (f"train.run_dir={tmp_path / 'run'}", f"train.epochs={num_epochs}")
    train = (sys.executable, "-m", "megaclass", "train", str(RECIPE), *SETTINGS, *places)
    job = bed.start(*options, "--host-discovery-script", f"cat {hosts}", *train)
    try:
        job.says("from epoch", 3, timeout_s=120)
        bed.do("cut", "h3")
        job.says("h3 has not answered for", timeout_s=60)
        job.says("generation 2: 2 ranks on h1:1, h2:1; before: 3.", timeout_s=60)
        job.says("generation 2 trains", timeout_s=60)
        bed.do("mend", "h3")
        job.says("generation 3: 3 ranks on h1:1, h2:1, h3:1; before: 2.", timeout_s=120)
        job.says("rank 2 of 3 from epoch", 2, timeout_s=60)
        bed.do("kill", "h2")
        job.says("generation 4: 2 ranks on h1:1, h3:1; before: 3.", timeout_s=60)
        job.says("generation 4 trains", timeout_s=60)
        (count / "stop").touch()
        assert job.wait(240) == 0, job.story()
    finally:
        bed.start_in_background("start", "h2")
        for host in ("h2", "h3"):
            bed.do("mend", host)
    assert lost_and_repeated(count, NUM_IMAGES, STEPS_PER_EPOCH, num_epochs) == (0, 0)
