"""What watches the loop: times per phase, slow ranks, limits for hangs, profiles, `megaclass top`; and ranks that disagree."""

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from megaclass.config.read import load_config_values
from megaclass.config.schema import TrainConfig
from megaclass.phases import PHASES, find_slow_rank
from megaclass.training.between_steps import describe_row
from megaclass.training.metrics import StepClock, gather_phases, phase_row
from megaclass.training.observer import HangLimit, SlowRanks
from megaclass.training.run.run import check_same_data, check_same_start
from megaclass.training.top import draw, read_run
from megaclass_launch.errors import ConfigError, LaunchError, UserError
from megaclass_launch.events_file import append_event
from megaclass_launch.rank_status import OwnStatus
from megaclass_launch.ranks.collectives import sum_over_ranks_
from megaclass_launch.world import World

CPU = torch.device("cpu")


# ---- phases and slow ranks ----


def _step_with_a_slow_rank():
    clock = StepClock(CPU)
    # A rank that begins late waits for no other one.
    sum_over_ranks_(torch.ones(3), None)
    with clock.step():
        clock.begin("forward")
        # The last rank loses its time here, the others wait for it in the collective.
        time.sleep(0.3 if dist.get_rank() == 2 else 0.02)
        sum_over_ranks_(torch.ones(3), None)
        clock.begin("backward")
        time.sleep(0.02)
    # Outside of a step no time is counted.
    sum_over_ranks_(torch.ones(3), None)
    return gather_phases(clock.read()[0] | {"data": 0.01}, CPU)[0]


def test_the_slow_rank_is_named_with_its_phase_although_all_ranks_take_the_same_time(run_ranks):
    phases, *others = run_ranks(3, _step_with_a_slow_rank)
    assert others == [phases, phases]
    totals = [sum(phases[phase][rank] for phase in PHASES) for rank in range(3)]
    assert max(totals) < 1.3 * min(totals)
    slow = find_slow_rank(phases)
    assert slow is not None
    assert (slow.rank, slow.phase) == (2, "forward")
    assert slow.slower > 1
    assert phases["exchange"][0] > 0.2 > phases["exchange"][2]
    row = phase_row(phases, slow)
    assert (row["slow_rank"], row["slow_phase"], row["rank_seconds"]) == (2, "forward", phases)


def test_a_rank_is_slow_from_20_percent_on_and_only_if_it_matters():
    def found(own, usual):
        return find_slow_rank(
            {**{phase: [0.0, 0.0, 0.0] for phase in PHASES}, "data": [usual, own, usual], "update": [0.1] * 3}
        )

    assert found(0.039, 0.02) is None
    assert found(0.05, 0.02).slower == pytest.approx(0.25)
    assert find_slow_rank({phase: [1e-5, 9e-5] for phase in PHASES}) is None
    assert find_slow_rank({phase: [1.0] for phase in PHASES}) is None


def test_a_slow_rank_is_in_the_progress_line_of_every_row_and_among_the_events_once_it_stays_slow(monkeypatch):
    slow = {phase: [0.01, 0.01] for phase in PHASES} | {"forward": [0.01, 0.05]}
    even = {phase: [0.01, 0.01] for phase in PHASES}
    noted = []
    events = SimpleNamespace(note=lambda event, step, **fields: noted.append((event, step, fields)))
    config = load_config_values({"data": {"path": "debug"}, "train": {"run_dir": "x"}}, where="test")
    run = SimpleNamespace(config=config, device=CPU, hosts=("a", "b"), events=events, world=World(rank=0, size=2))
    run.folder = SimpleNamespace(path=Path("unused"))
    slow_ranks = SlowRanks(run)
    shown = []
    for step, phases in enumerate((slow, even, slow, slow, slow, slow), start=1):
        monkeypatch.setattr("megaclass.training.observer.gather_phases", lambda own, device, p=phases: (p, []))
        row = slow_ranks.read(SimpleNamespace(phase_s={}, last_step_s=0.1), step)
        row |= {"loss": 1.0, "images_per_second": 10.0, "learning_rate": 0.1, "data_wait_share": 0.0}
        shown.append(describe_row(row, slow_ranks.describe()))
    assert [line.endswith("rank 1 (b) 100% slower: forward") for line in shown] == [True, False, True, True, True, True]
    assert noted == [("slow_rank", 5, {"rank": 1, "host": "b", "phase": "forward", "slower": 1.0})]


# ---- limits ----


def test_the_limit_is_ten_median_steps_and_at_least_30_s_unless_given(monkeypatch):
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    status = OwnStatus(None)
    settings = TrainConfig(run_dir="x")
    limit = HangLimit(settings, status, first_step=5)
    assert (status.read().step, status.read().allowed_s) == (5, 300.0)
    limit.step_done(6)
    assert (status.read().step, status.read().allowed_s) == (6, 300.0)
    # Before the first report ten times the longest step, if that is more.
    now += 40.0
    limit.step_done(7)
    assert status.read().allowed_s == 400.0
    limit = HangLimit(settings, status, first_step=5)
    limit.step_done(6)
    for seconds in (7.0, 9.0, 100.0):
        now += seconds
        limit.all_read()
        limit.step_done(7)
    # Ten medians of 9 s, and one step that a GPU may still have to do.
    assert status.read().allowed_s == 10 * 9.0 + 9.0
    HangLimit(settings, status, first_step=0, is_compiled=True)
    assert status.read().allowed_s == 600.0
    given = HangLimit(replace(settings, hang_after_s=4.0), status, first_step=0)
    given.step_done(1)
    assert status.read().allowed_s == 4.0
    HangLimit(replace(settings, hang_after_s=0.0), status, first_step=0).step_done(1)
    assert status.read().allowed_s == 0.0
    with pytest.raises(ConfigError, match=r"train\.hang_after_s is 0\.5; it must be 0, or at least 1 second"):
        replace(settings, hang_after_s=0.5)


# ---- ranks that disagree ----


def _config(**changes):
    train = {"run_dir": "x", "seed": changes.pop("seed", 0)}
    return load_config_values({"data": {"path": changes.pop("path", "debug")}, "train": train}, where="test")


def _refused(version):
    from megaclass.training.run import run as same_start

    rank = dist.get_rank()
    # Each host may keep its data elsewhere.
    check_same_start(_config(path=f"/data/{rank}"), CPU)
    messages = []
    installed = same_start.__version__
    same_start.__version__ = version if rank == 1 else installed
    for action in (
        lambda: check_same_start(_config(seed=rank), CPU),
        lambda: check_same_data("abc" if rank else "def", 10, 2, ("a", "b"), CPU),
        lambda: check_same_data("abc", 10 + rank, 2, ("a", "b"), CPU),
    ):
        with pytest.raises(LaunchError) as caught:
            action()
        messages.append(str(caught.value))
    # These processes stay for other tests.
    same_start.__version__ = installed
    check_same_data("abc" if rank == 0 else "", 10, 2, ("a", "a"), CPU)
    return messages


def test_ranks_with_another_seed_version_or_data_refuse_to_start_and_show_the_difference(run_ranks):
    first, second = run_ranks(2, _refused, "9.9")
    assert first == second
    settings, fingerprint, number = first
    assert "none of them starts" in settings
    assert "  train.seed: 0 on rank 0 (" in settings
    assert "; 1 on rank 1 (" in settings
    assert "; 9.9 on rank 1 (" in settings
    assert "data fingerprint: def on rank 0 (a); abc on rank 1 (b)" in fingerprint
    assert "number of images: 10 on rank 0 (a); 11 on rank 1 (b)" in number


# ---- settings ----


@pytest.mark.parametrize("steps", ["7", "9:9", "10:3", "a:b", "-1:4"])
def test_steps_to_profile_that_are_no_range_are_refused(steps):
    with pytest.raises(ConfigError, match=r"train\.profile is .*; it must be first:stop"):
        TrainConfig(run_dir="x", profile=steps)


# ---- megaclass top ----


def lines_of(run, now=None, width=80):
    console = Console(width=width, highlight=False, force_terminal=False)
    view = read_run(run)
    with console.capture() as shown:
        console.print(draw(view, view.changed_at + 90 if now is None else now))
    return [line.rstrip() for line in shown.get().splitlines()]


def test_top_shows_loss_speed_ranks_and_events_of_a_run_and_survives_foreign_content(tmp_path):
    with pytest.raises(UserError, match="is not a run folder"):
        read_run(tmp_path)
    append_event(tmp_path, "start", step=0, num_steps=200, world_size=2)
    assert "no loss yet" in lines_of(tmp_path)
    rows = [
        {"step": step, "loss": 50.0 - step / 4, "images_per_second": 640.0, "elapsed_s": step / 10}
        for step in range(10, 110, 10)
    ]
    phases = {phase: [0.01, 0.01] for phase in PHASES} | {"data": [0.01, 0.05]}
    rows[-1] |= {"slow_rank": 1, "slow_phase": "data\x1b[2J", "slower": 0.9, "rank_seconds": phases, "data_s": 0.03}
    text = "".join(json.dumps(row) + "\n" for row in rows)
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(text + '{"step": 11, "loss": "x", "rank_seconds": {"data": 3}}\n' + "junk\n")
    append_event(tmp_path, "warning", text="the disk is nearly full\x1b]0;x\x07")
    assert lines_of(tmp_path)
    metrics.write_text(text)
    lines = lines_of(tmp_path, width=100)
    shown = "\n".join(lines)
    assert any("step 100 of 200 (50%), running, last sign of life" in line and "10 s left" in line for line in lines)
    assert "images_per_second 640" in shown and "loss █" in shown and "▁ 25, from 25 to 47.5" in shown
    assert ["1", "50.0", "10.0", "10.0", "10.0", "10.0", "80.0"] in [line.split() for line in lines]
    assert "the disk is nearly full" in shown and "\x1b" not in shown
    append_event(tmp_path, "hang", step=100, text="rank 1 sleeps")
    assert "hung" in "".join(lines_of(tmp_path)[:4])
    append_event(tmp_path, "resume", step=100, num_steps=200, world_size=2)
    assert "running" in "".join(lines_of(tmp_path)[:4])
    append_event(tmp_path, "end", step=200, outcome="finished")
    assert ", finished" in "".join(lines_of(tmp_path)[:4])


def test_top_shows_a_run_that_has_diverged_and_numbers_that_no_run_writes(tmp_path):
    rows = [{"step": 10, "loss": 50.0}, {"step": 20, "loss": math.inf}, {"step": 30, "loss": math.nan}]
    rows.append({"step": 40, "loss": 10**400})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert append_event(tmp_path, "end", step=30, outcome="failed\x1b[2J")
    text = "\n".join(lines_of(tmp_path))
    assert "step 30, failed" in text and "50, from 50 to 50" in text and "\x1b" not in text


def test_top_shows_the_ranks_with_the_most_time_of_their_own(tmp_path):
    phases = {phase: [0.01] * 40 for phase in PHASES} | {"data": [0.01 + 0.001 * rank for rank in range(40)]}
    row = {"step": 10, "loss": 5.0, "images_per_second": 640.0, "rank_seconds": phases}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    ranks = [line.split()[0] for line in lines_of(tmp_path) if line.endswith(tuple("0123456789")) and " 10.0 " in line]
    assert ranks == [str(rank) for rank in range(24, 40)]
