"""`megaclass train` on a tiny set: what a run leaves, what it survives, what it refuses.

The workers of a test session share data and finished runs (see tests/shared_folder.py): tests read them or work on copies.
"""

import fcntl
import json
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from tests.commands import ended_in_this_process
from tests.forked import Forked, ended_ranks, megaclass_command, run_forked, torchrun
from tests.shared_folder import made_once

from megaclass.cli.main import main
from megaclass_launch.events_file import read_events

# A training with an export takes ten seconds, and minutes on a busy machine.
PATIENCE_S = 500
pytestmark = [pytest.mark.ranks, pytest.mark.timeout(PATIENCE_S + 100)]

RECIPE = """
[synth]
identities = 20
images_per_identity = 8
size = 32
pairs = 40
[data]
path = "{data}"
[backbone]
name = "slim"
embedding_dim = 16
[head]
margin = "cosface"
margin_size = 0.1
scale = 16.0
sample_rate = 0.5
[optimizer]
warmup_epochs = 0.5
power = 1.0
[train]
run_dir = "{run_dir}"
epochs = 8
global_batch = 32
report_steps = 1
[export]
onnx = false
"""
NUM_STEPS = 40
SUMMARY_KEYS = {
    "verification_accuracy",
    "pixel_baseline_accuracy",
    "images_per_second",
    "world_size",
    "num_classes",
    "steps",
    "final_loss",
}


@dataclass
class Setting:
    """A folder with drawn data and a recipe for it."""

    folder: Path
    data: Path
    recipe: Path

    def train(self, *arguments, env=None):
        """Trains in processes of its own."""
        command = ("train", str(self.recipe), *arguments)
        return run_forked(megaclass_command, *command, env=env, timeout_s=PATIENCE_S)

    def train_here(self, *arguments):
        """Trains on one rank, in this process."""
        return ended_in_this_process(["train", str(self.recipe), *arguments])


@dataclass
class Run:
    """A run that ended well."""

    path: Path
    stdout: str
    stderr: str

    @property
    def summary(self):
        return json.loads((self.path / "summary.json").read_text())

    @property
    def losses(self):
        return losses_of(self.path)


def rows_of(run_dir):
    lines = (run_dir / "metrics.jsonl").read_text().split("\n")[:-1] if (run_dir / "metrics.jsonl").exists() else []
    return [json.loads(line) for line in lines]


def losses_of(run_dir):
    return {row["step"]: row["loss"] for row in rows_of(run_dir)}


def in_order(text, *patterns):
    return re.search(".*".join(patterns), text, flags=re.DOTALL) is not None


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    def draw(folder):
        options = ["--identities", "20", "--images-per-identity", "8", "--size", "32", "--pairs", "40"]
        assert main(["data", "synth", *options, "--out", str(folder / "data")]) == 0
        shutil.copy(folder / "data" / "verification.bin", folder / "data" / "lfw.bin")
        (folder / "recipe.toml").write_text(RECIPE.format(data=folder / "data", run_dir=folder / "run"))

    folder = made_once(tmp_path_factory, "train", draw)
    return Setting(folder, folder / "data", folder / "recipe.toml")


@pytest.fixture(scope="module")
def alone(setting, tmp_path_factory):
    """One process, never stopped."""

    def train(folder):
        done = setting.train(f"train.run_dir={folder / 'run'}", "export.onnx=true")
        assert done.returncode == 0, done.stderr
        (folder / "stdout").write_text(done.stdout)
        (folder / "stderr").write_text(done.stderr)

    folder = made_once(tmp_path_factory, "train-alone", train)
    return Run(folder / "run", (folder / "stdout").read_text(), (folder / "stderr").read_text())


@pytest.fixture(scope="module")
def pair(setting, tmp_path_factory):
    """Two processes on a terminal 80 columns wide; standard error is that terminal."""

    def train(folder):
        primary, secondary = pty.openpty()
        fcntl.ioctl(secondary, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        arguments = ["train", str(setting.recipe), f"train.run_dir={folder / 'run'}", "train.nproc=2"]
        command = [sys.executable, "-m", "megaclass", *arguments]
        process = subprocess.Popen(
            command, env={**os.environ, "TERM": "xterm"}, stdout=subprocess.PIPE, stderr=secondary, text=True
        )
        os.close(secondary)
        seen = b""
        try:
            while chunk := os.read(primary, 65536):
                seen += chunk
        except OSError:  # what Linux says when the last writer has left
            pass
        finally:
            os.close(primary)
        stdout, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, seen.decode()
        (folder / "stdout").write_text(stdout)
        (folder / "terminal").write_bytes(seen)

    folder = made_once(tmp_path_factory, "train-pair", train)
    return Run(folder / "run", (folder / "stdout").read_text(), (folder / "terminal").read_bytes().decode())


# --- what a run leaves ---


def test_a_run_leaves_settings_curve_numbers_report_models_and_checkpoints(alone):
    names = {path.name for path in alone.path.iterdir() if not path.name.startswith(".")}
    assert names >= {
        "config.toml",
        "metrics.jsonl",
        "summary.json",
        "report.html",
        "model.safetensors",
        "model.onnx",
        "checkpoints",
    }
    assert {path.name for path in (alone.path / "checkpoints").iterdir()} == {"step-000000035", "step-000000040"}


def test_the_summary_has_the_numbers(alone):
    summary = alone.summary
    assert summary.keys() >= SUMMARY_KEYS
    assert (summary["world_size"], summary["num_classes"], summary["steps"]) == (1, 20, NUM_STEPS)
    assert summary["final_loss"] == alone.losses[NUM_STEPS]
    assert summary["images_per_second"] > 0
    for name in ("verification_accuracy", "pixel_baseline_accuracy"):
        assert 0.4 <= summary[name] <= 1.0


def test_every_verification_set_beside_the_data_is_evaluated(alone):
    sets = alone.summary["verification"]
    assert sets.keys() == {"lfw", "verification", "holdout-classes"}
    assert alone.summary["classification_top_1"] == sets["holdout-classes"]["top_k"]["1"]
    assert sets["lfw"]["accuracy"] == sets["verification"]["accuracy"] == alone.summary["verification_accuracy"]


def test_the_curve_has_a_row_a_report_and_the_loss_falls(alone):
    rows = rows_of(alone.path)
    assert [row["step"] for row in rows] == list(range(1, NUM_STEPS + 1))
    assert all(row.keys() >= {"step", "epoch", "learning_rate", "loss", "images_per_second"} for row in rows)
    assert all(-1 < row["target_cosine"] < 1 and row["head_gradient_norm"] > 0 for row in rows)
    # Half of the negatives, and whoever is in the batch.
    assert all(0.5 < row["sampled_share"] <= 1 for row in rows)
    losses = [row["loss"] for row in rows]
    assert np.mean(losses[-5:]) < 0.7 * np.mean(losses[:5])
    rates = [row["learning_rate"] for row in rows]
    assert rates[0] < rates[1] == max(rates) and rates[1:] == sorted(rates[1:], reverse=True)


def test_the_settings_that_are_kept_are_those_that_are_shown(alone, setting, capsys):
    shown = ["train", str(setting.recipe), f"train.run_dir={alone.path}", "export.onnx=true", "--show-config"]
    assert main(shown) == 0
    assert (alone.path / "config.toml").read_text() == capsys.readouterr().out


def test_the_exported_models_give_embeddings(alone):
    onnxruntime = pytest.importorskip("onnxruntime")
    from safetensors.torch import load_file

    session = onnxruntime.InferenceSession(str(alone.path / "model.onnx"), providers=["CPUExecutionProvider"])
    images = np.random.default_rng(0).uniform(-1, 1, (3, 3, 32, 32)).astype(np.float32)
    (embeddings,) = session.run(None, {session.get_inputs()[0].name: images})
    assert embeddings.shape == (3, 16) and np.isfinite(embeddings).all()
    assert load_file(alone.path / "model.safetensors")["fc.weight"].shape == (16, 128 * 2 * 2)


def test_the_end_says_where_everything_is_and_what_to_do_next(alone):
    for name in ("report.html", "model.safetensors", "model.onnx", "summary.json", "metrics.jsonl", "config.toml"):
        assert name in alone.stdout
    assert str(alone.path) in alone.stdout and "Next: " in alone.stdout


def test_without_a_terminal_progress_is_plain_lines(alone):
    assert re.search(r"^training 40/40, 0 s left, .*loss \d.*images/s", alone.stderr, flags=re.MULTILINE)
    assert "\x1b" not in alone.stderr and "\r" not in alone.stderr


def test_on_a_terminal_a_bar_shows_loss_speed_and_time_left(pair):
    lines = [line for line in re.split(r"[\r\n]+", pair.stderr) if "training" in line]
    assert any(
        in_order(line, "training", "━", r"\d+/40", r"\d+:\d\d", r"loss", r"\d\.\d", r"images/s") for line in lines
    )


def test_every_rank_says_which_device_it_uses(pair):
    for rank in (0, 1):
        assert re.search(rf"rank {rank} of 2 on \S+: cpu \(1 thread\), gloo", pair.stderr)


def test_two_processes_train_as_well_as_one(alone, pair):
    assert pair.summary["world_size"] == 2
    assert pair.losses.keys() == alone.losses.keys()
    # The same images and centres; only the batch statistics are each rank's own.
    assert abs(pair.losses[1] - alone.losses[1]) < 1.0
    assert pair.losses[NUM_STEPS] < 0.7 * pair.losses[1]


def test_under_torchrun_the_same_recipe_gives_the_same_losses(setting, pair, tmp_path):
    """The last steps, from a checkpoint of a run whose ranks `megaclass train` started."""
    run_dir = Path(shutil.copytree(pair.path, tmp_path / "run"))
    (run_dir / "summary.json").unlink()
    shutil.rmtree(run_dir / "checkpoints" / "step-000000040")
    done = torchrun(2, megaclass_command, "train", str(setting.recipe), f"train.run_dir={run_dir}", "--resume")
    assert done.returncode == 0, done.stderr
    assert f"resuming from {run_dir}/checkpoints/step-000000035, step 35\n" in done.stderr
    assert losses_of(run_dir) == pair.losses
    names = ("model.safetensors", "checkpoints/step-000000040/shared.safetensors")
    assert all((run_dir / name).read_bytes() == (pair.path / name).read_bytes() for name in names)
    assert json.loads((run_dir / "summary.json").read_text())["world_size"] == 2


# --- stopped and resumed ---


@dataclass
class Stopped:
    run_dir: Path
    last_step: int
    second_job: tuple[int, str]


def checkpoints_of(run_dir):
    return sorted((run_dir / "checkpoints").glob("step-*"))


@pytest.fixture(scope="module")
def stopped(setting, tmp_path_factory):
    """A run killed after its second checkpoint; before that, while it stood still, a second job tried the same folder."""

    def train_and_kill(folder):
        run_dir = folder / "run"
        arguments = ["train", str(setting.recipe), f"train.run_dir={run_dir}"]
        with Forked(megaclass_command, *arguments) as process:
            deadline = time.monotonic() + 120
            while len(rows_of(run_dir)) < 13 or len(checkpoints_of(run_dir)) < 2:
                assert process.is_alive() and time.monotonic() < deadline, process.stderr
                time.sleep(0.002)
            os.kill(process.pid, signal.SIGSTOP)
            second = ended_in_this_process([*arguments, "--overwrite"])
        (folder / "second.json").write_text(json.dumps([second.returncode, second.stderr]))

    folder = made_once(tmp_path_factory, "train-stopped", train_and_kill)
    second_job = json.loads((folder / "second.json").read_text())
    return Stopped(folder / "run", rows_of(folder / "run")[-1]["step"], second_job)


def test_a_second_job_in_the_folder_of_a_running_one_is_refused_and_touches_nothing(stopped):
    code, err = stopped.second_job
    assert code == 2
    assert f"megaclass: Another job is running in {stopped.run_dir}: choose another train.run_dir." in err
    assert len(rows_of(stopped.run_dir)) >= 13


def test_a_run_killed_midway_and_resumed_ends_bit_for_bit_like_one_never_stopped(setting, stopped, alone, tmp_path):
    run_dir = Path(shutil.copytree(stopped.run_dir, tmp_path / "run"))
    assert stopped.last_step < NUM_STEPS and not (run_dir / "summary.json").exists()
    done = setting.train_here(f"train.run_dir={run_dir}", "--resume")
    assert done.returncode == 0, done.stderr
    assert re.search(r"megaclass: resuming from \S*/checkpoints/step-\d+, step \d+", done.stderr)
    assert losses_of(run_dir) == alone.losses
    names = ("model.safetensors", "checkpoints/step-000000040/shared.safetensors")
    assert all((run_dir / name).read_bytes() == (alone.path / name).read_bytes() for name in names)


def test_resumed_on_another_number_of_processes_past_a_damaged_checkpoint_it_goes_on_and_ends(
    setting, stopped, alone, tmp_path
):
    run_dir = Path(shutil.copytree(stopped.run_dir, tmp_path / "run"))
    # Three where the run was killed between publishing the newest and removing the oldest.
    *_, previous, newest = checkpoints_of(run_dir)
    damaged = next(newest.glob("head-*"))
    damaged.write_bytes(damaged.read_bytes()[:-3])
    first_step = int(previous.name.removeprefix("step-"))
    profile = ("train.profile=37:39", "train.profile_ranks=[1]")
    arguments = ["train", str(setting.recipe), "--resume", f"train.run_dir={run_dir}", *profile]
    ranks = ended_ranks(2, megaclass_command, *arguments, ranks_per_host=1)
    assert [rank.returncode for rank in ranks] == [0, 0], [rank.stderr for rank in ranks]
    assert f"megaclass: passed over a checkpoint: {damaged} has" in ranks[0].stderr
    assert f"resuming from {previous}, step {first_step}\n" in ranks[0].stderr
    losses = losses_of(run_dir)
    assert list(losses) == list(range(1, NUM_STEPS + 1))
    assert [losses[step] for step in range(1, first_step + 1)] == list(alone.losses.values())[:first_step]
    assert json.loads((run_dir / "summary.json").read_text())["world_size"] == 2
    # What happened is in the diary, and the report shows the ranks and links the profile of the steps that were asked for.
    events = read_events(run_dir)[0]
    assert events[0]["event"] == "start"
    change, resume = [event for event in events if event["event"] in ("rank_change", "resume")]
    assert (change["before"], change["after"], resume["step"], resume["num_steps"]) == (1, 2, first_step, NUM_STEPS)
    # On a busy machine one rank may well be slow.
    last = [event["event"] for event in events if event["step"] in (39, 40) and event["event"] != "slow_rank"]
    assert last == ["profile", "save", "end"]
    assert events[-1]["outcome"] == "finished"
    trace = json.loads((run_dir / "profile" / "rank-1.trace.json").read_text())["traceEvents"]
    assert any("convolution" in event.get("name", "") for event in trace)
    page = (run_dir / "report.html").read_text()
    assert 'href="profile/rank-1.trace.json"' in page
    assert page.count('<rect class="heat-') == 2 * NUM_STEPS


def test_resuming_a_finished_run_writes_its_numbers_again(setting, alone, tmp_path):
    run_dir = Path(shutil.copytree(alone.path, tmp_path / "run"))
    for name in ("summary.json", "report.html", "model.safetensors"):
        (run_dir / name).unlink()
    done = setting.train_here(f"train.run_dir={run_dir}", "--resume=auto")
    assert done.returncode == 0, done.stderr
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["final_loss"] == alone.summary["final_loss"]
    assert summary["verification_accuracy"] == alone.summary["verification_accuracy"]
    assert summary["images_per_second"] > 0
    assert losses_of(run_dir) == alone.losses


# --- refused ---


def test_a_finished_run_whose_model_cannot_be_written_says_so_and_writes_it_when_resumed(setting, alone, tmp_path):
    run_dir, name = Path(shutil.copytree(alone.path, tmp_path / "run")), "model.safetensors"
    (run_dir / name).unlink()
    (run_dir / name).mkdir()
    arguments = (f"train.run_dir={run_dir}", "train.nproc=1", "--resume")
    ended = setting.train_here(*arguments)
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert f"All {NUM_STEPS} steps are done and saved, but not all results could be written" in ended.stderr
    (run_dir / name).rmdir()
    assert setting.train_here(*arguments).returncode == 0
    assert (run_dir / name).is_file()


@pytest.fixture
def refused(setting, tmp_path, capfd):
    """refused(*arguments): standard error of a command that ends with 2."""

    def run(*arguments):
        if not any(word.startswith("train.run_dir=") for word in arguments):
            arguments = (f"train.run_dir={tmp_path}/run", *arguments)
        assert main(["train", str(setting.recipe), *arguments]) == 2
        err = capfd.readouterr().err
        assert "Traceback" not in err
        return err

    return run


def snapshot(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != ".lock"}


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_folder_that_holds_a_run_is_refused_and_left_as_it_is(refused, alone, tmp_path, nproc):
    run_dir = Path(shutil.copytree(alone.path, tmp_path / "run"))
    before = snapshot(run_dir)
    assert f"The run folder {run_dir} already holds a run: continue it with --resume" in refused(f"train.nproc={nproc}")
    assert snapshot(run_dir) == before


def test_overwrite_removes_the_run_and_nothing_else(setting, alone, tmp_path):
    run_dir = Path(shutil.copytree(alone.path, tmp_path / "run"))
    (run_dir / "notes.txt").write_text("mine")
    for name in ("export/onnx", "wandb/run-1", "checkpoints/step-000000040-mine"):
        (run_dir / name).mkdir(parents=True)
    begun_ns = time.time_ns()
    done = setting.train_here("--overwrite", f"train.run_dir={run_dir}", "train.epochs=0.2")
    assert done.returncode == 0, done.stderr
    assert list(losses_of(run_dir)) == [1]
    names = {path.name for path in (run_dir / "checkpoints").iterdir()}
    assert names == {"step-000000001", "step-000000040-mine"}
    left = [path.name for path in run_dir.iterdir() if path.stat().st_mtime_ns < begun_ns]
    assert left == ["notes.txt"]


def test_a_package_that_the_end_would_need_is_asked_for_before_anything_begins(refused, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    for nproc in (1, 2):
        err = refused(
            "export.onnx=true", f"train.nproc={nproc}", f"data.path={tmp_path}/data", f"train.run_dir={tmp_path}/run"
        )
        assert "export.onnx needs onnxscript: pip install 'megaclass[onnx]', or disable it: export.onnx=false." in err
    assert not list(tmp_path.iterdir())


def test_processes_that_are_not_started_because_a_starter_is_in_charge_are_told(refused, monkeypatch):
    """As in a shell that `srun --pty` opened."""
    for name in ("SLURM_PROCID", "SLURM_STEP_ID", "SLURM_LOCALID", "SLURM_NODEID"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    err = refused("train.nproc=2", "train.device=cuda")
    assert "train.nproc=2 is ignored, because Slurm is in charge and started one process." in err
    assert "first run `unset SLURM_STEP_ID`" in err
    assert "is not used" not in refused("train.nproc=1", "train.device=cuda")


def test_resume_and_overwrite_exclude_each_other(refused):
    assert "--resume and --overwrite exclude each other" in refused("--resume", "--overwrite")


def test_resuming_with_other_settings_is_refused_with_the_difference(refused, alone, tmp_path):
    run_dir = Path(shutil.copytree(alone.path, tmp_path / "run"))
    before = snapshot(run_dir)
    err = refused("--resume", "head.scale=20.0", "train.seed=1")
    newest = run_dir / "checkpoints" / "step-000000040"
    assert f"{newest} belongs to another run: head.scale was 16.0, is 20.0; train.seed was 0, is 1." in err
    assert snapshot(run_dir) == before


def test_resuming_where_there_is_nothing_is_refused(refused, tmp_path):
    assert f"There is no whole checkpoint in {tmp_path}/run/checkpoints" in refused(
        f"train.run_dir={tmp_path}/run", "--resume"
    )


def test_resuming_from_a_path_that_is_no_checkpoint_is_refused(refused, tmp_path):
    err = refused(f"train.run_dir={tmp_path}/run", f"--resume={tmp_path}")
    assert f"megaclass: {tmp_path}/manifest.json is missing: the folder is not a checkpoint" in err


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_data_folder_without_records_says_what_was_looked_for_and_what_was_found(refused, tmp_path, nproc):
    data = tmp_path / "data"
    data.mkdir()
    (data / "train.lst").write_text("")
    err = refused("synth.identities=0", f"data.path={data}", f"train.run_dir={tmp_path}/run", f"train.nproc={nproc}")
    assert err.startswith(f"megaclass: Cannot open the data at {data}: looked for train.rec and train.idx")
    assert err.endswith("missing; found train.lst.\n") and err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_data_of_other_arguments_are_not_overwritten(refused, setting, tmp_path):
    data = Path(shutil.copytree(setting.data, tmp_path / "data"))
    before = snapshot(data)
    assert str(data) in refused("synth.identities=21", f"data.path={data}")
    assert snapshot(data) == before


def test_labels_beyond_the_number_of_classes_end_the_command_once_and_clearly(setting, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(setting.data, data)
    (data / "property").write_text("5,32,32")
    done = setting.train("synth.identities=0", f"data.path={data}", f"train.run_dir={tmp_path}/run", "train.nproc=2")
    assert done.returncode == 2
    assert done.stderr.count("has label 5, but") == 1
    assert f"{data}/property says num_classes = 5" in done.stderr
    assert "Traceback" not in done.stderr


def _train_with_data_on_one_host(command, *data_by_rank):
    megaclass_command(*command, f"data.path={data_by_rank[int(os.environ['RANK'])]}")


def test_where_hosts_keep_logs_of_their_own_each_says_which_rank_ended_the_run_and_why(setting, tmp_path):
    """Two ranks, each the only one of its host; the data is missing on the second."""
    command = ["train", str(setting.recipe), f"train.run_dir={tmp_path}/run"]
    ranks = ended_ranks(2, _train_with_data_on_one_host, command, setting.data, tmp_path / "nothing", ranks_per_host=1)
    assert [rank.returncode for rank in ranks] == [2, 2]
    logs = [rank.stderr for rank in ranks]
    reason = f"Cannot open the data at {tmp_path}/nothing: there is no such folder."
    assert logs[0].splitlines()[-1].startswith(f"megaclass: rank 1: {reason}")
    assert logs[1].splitlines()[-1].startswith(f"megaclass: {reason}")


@pytest.mark.parametrize(
    ("setting_text", "message"),
    [
        ("train.run_dir={file}", "The run folder {file} is a file"),
        ("train.run_dir={file}/run", "Cannot write to the run folder {file}/run: Not a directory"),
        ("train.global_batch=161", "A global batch of 161 images is more than the 160 there are"),
        ("backbone.name=slimm", "backbone.name is 'slimm', which is not known; did you mean slim?"),
        ("head.margin=magface", "head.margin_size is 0.1, but the margin magface has no single size."),
        ("train.device=cuda", "was asked for device 'cuda', but torch"),
    ],
)
def test_what_only_the_start_can_find_is_told_without_a_traceback(refused, tmp_path, setting_text, message):
    file = tmp_path / "file"
    file.write_text("")
    err = refused(f"train.run_dir={tmp_path}/run", setting_text.format(file=file))
    assert message.format(file=file) in err


def test_a_rank_that_dies_at_start_ends_the_command_at_once_and_is_named(setting, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal\nif os.environ.get('RANK') == '1': os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    # Before `train` gives up; alone, rank 0 would wait for 600 s.
    done = setting.train(f"train.run_dir={tmp_path}/run", "train.nproc=2", env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 128 + signal.SIGKILL
    assert re.search(r"megaclass: rank 1 on \S+ \(pid \d+\) ended with signal SIGKILL; the other 1 ", done.stderr)


# --- variants of the head ---


@pytest.mark.parametrize(
    "options",
    [
        ("head.margin=dynamic", "head.margin_size=0.2", "head.margin_schedule=[[0,0.0],[6,1.0]]", "head.subcentres=2"),
        ("head.margin=uniface", "head.margin_size=0.1", "head.negatives=frequencies"),
        ("head.margin=intertopk", "head.loss=decoupled", "head.max_labels=2", "head.negatives=in-batch"),
        ("head.margin=cosface", "head.label_smoothing=0.1", "head.sample_rate=1.0"),
    ],
    ids=["dynamic, schedule, sub-centres", "uniface", "inter-topk", "label smoothing"],
)
def test_a_variant_of_the_head_is_trained_resumed_evaluated_and_exported(options, setting, tmp_path):
    run, copy = tmp_path / "run", tmp_path / "copy"
    short = ("train.epochs=2", "train.checkpoint_epochs=1", "export.onnx=true", *options)
    assert setting.train_here(f"train.run_dir={run}", *short).returncode == 0
    losses = {row["step"]: row["loss"] for row in rows_of(run)}
    assert len(losses) == 10 and all(np.isfinite(list(losses.values())))
    assert (run / "model.onnx").is_file() and "holdout-classes" in json.loads((run / "summary.json").read_text())[
        "verification"
    ]
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "checkpoints" / "step-000000010")
    resumed = setting.train_here(f"train.run_dir={copy}", *short, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert {row["step"]: row["loss"] for row in rows_of(copy)} == losses
    if "head.subcentres=2" in options:
        lines = (run / "subcentres.tsv").read_text().splitlines()
        assert lines[0] == "class\timages of the last epoch\tshare in minor sub-centres"
        assert "In minor sub-centres" in (run / "report.html").read_text()
