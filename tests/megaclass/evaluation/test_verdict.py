"""The rules of the verdict, each on a real run that shows it, and at their edges on constructed rows."""

import importlib.util
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megaclass.config.schema import HeadConfig
from megaclass.evaluation.report.curves import HealthyRange, cosine_range, gradient_range, loss_without_knowledge
from megaclass.evaluation.report.from_runs import ModelReport, report_of_runs
from megaclass.evaluation.report.page import render_report
from megaclass.evaluation.report.ranks import time_line, time_line_picture
from megaclass.evaluation.report.templates import environment
from megaclass.evaluation.report.verdict import RULES, verdict

RECORDED = Path(__file__).parent / "recorded"


def made_runs() -> Any:
    """The script that trained the recorded runs."""
    spec = importlib.util.spec_from_file_location("make_runs", RECORDED / "make_runs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read(folder: Path) -> ModelReport:
    return report_of_runs([folder], device=torch.device("cpu")).models[0]


# What a reader must find in the sentence about each run, which make_runs.py trained.
SENTENCES = {
    "healthy": r"healthy",
    "failed": r"the run failed: NotFiniteError: 16 embedding\(s\) .* are NaN or infinite",
    "hang": r"hung at step 39: no step has finished for 21 s\. rank 1 \(host\): in recorded/make_runs\.py:67 .*, asleep",
    "not-finite": r"127 steps were skipped because values were not finite, the first before step 4",
    "rising-loss": r"learning rate too high: loss rose from step 32, from 11\.31 to 24\.71",
    "plateau": r"stays on a plateau: loss 7\.84 at last, cosine with the own centre only 0\.07, but 0\.28 is needed",
    "plateau-100": r"stays on a plateau",
    "flat-loss": r"hardly learns: loss 17\.20 at first, 17\.46 at last; raise optimizer\.lr",
    "overfitting": r"learned by heart: loss fell to 5\.88, but the accuracy on pairs never passed 56\.0%",
    "unlearning": r"overfitting: the accuracy on pairs, .*, fell from 70\.8% at step 64 to 65\.3% while the loss fell",
    "slow-loader": r"loader is the bottleneck: 87% waiting; raise data\.workers",
    "slow-rank": r"rank 1 is slow, most in forward: in 24 of 32 reports",
}


@pytest.mark.parametrize("name", SENTENCES)
def test_each_rule_speaks_on_a_run_that_shows_it_and_no_other_does(name: str) -> None:
    found = verdict(read(RECORDED / "runs" / name))
    assert [one.rule for one in found] == [made_runs().RUNS[name].rule]
    assert re.search(SENTENCES[name], found[0].text), found[0].text


def test_every_rule_has_a_run_and_a_line_in_the_documentation() -> None:
    assert set(made_runs().RUNS) == set(SENTENCES)
    assert {made.rule for made in made_runs().RUNS.values()} == {*RULES, "healthy"}
    page = Path(__file__).parents[3] / "docs" / "tutorials" / "healthy-run.md"
    table = page.read_text().partition("## The verdict")[2]
    assert [rule for rule in RULES if f"| {rule} |" not in table] == []


@pytest.mark.soak
@pytest.mark.parametrize("name", SENTENCES)
def test_a_run_trained_now_shows_the_same_rule(name: str, tmp_path: Path) -> None:
    script = made_runs()
    script.KEPT = tmp_path
    script.make(name, script.RUNS[name])
    # A busy machine may add that it waited for data or that a rank was slow.
    assert script.RUNS[name].rule in [one.rule for one in verdict(read(tmp_path / name))]


def rows(losses: list[float | None], **columns: Any) -> list[dict[str, Any]]:
    return [{"step": 20 * (i + 1), "loss": loss, **columns} for i, loss in enumerate(losses)]


FALLING = [40 * 0.9**i + 2 for i in range(40)]
NEEDED = HealthyRange(0.4, 1.0, "")


def rules_of(metrics: Any, events: Any = (), cosines: HealthyRange | None = None) -> list[str]:
    return [one.rule for one in verdict(ModelReport(name="run", metrics=metrics, events=events, cosines=cosines))]


def test_a_falling_noisy_loss_is_healthy_and_a_few_rows_are_not_judged() -> None:
    noisy = [loss * (1.1 if i % 2 else 0.9) for i, loss in enumerate(FALLING)]
    assert rules_of(rows(noisy, data_wait_share=0.02, skipped_steps=0)) == ["healthy"]
    assert rules_of(rows([9.0, 8.0, None])) == ["short"]


def test_a_low_cosine_is_a_finding_after_the_end_only_and_good_weights_need_no_falling_loss() -> None:
    start, end = {"time": 1.0, "event": "start", "step": 0}, {"time": 2.0, "event": "end", "outcome": "finished"}
    low = rows(FALLING, target_cosine=0.1)
    assert rules_of(low, [start, end], NEEDED) == ["low cosine"]
    assert rules_of(low, [start], NEEDED) == ["healthy"], "it still rises while the run goes on"
    tuned = rows([5.0] * 40, target_cosine=0.6)
    assert rules_of(tuned, [start, end], NEEDED) == ["healthy"]
    assert rules_of(tuned, [start, end]) == ["flat loss"]


def test_an_accuracy_that_falls_with_the_loss_is_overfitting_and_one_that_wavers_is_not() -> None:
    def run(*accuracies: float) -> list[dict[str, Any]]:
        found = rows(FALLING)
        for place, accuracy in enumerate(accuracies):
            found[(place + 1) * 40 // len(accuracies) - 1]["verification_accuracy"] = accuracy
        return found

    (found,) = verdict(ModelReport(name="run", metrics=run(0.8, 0.9, 0.86, 0.82)))
    assert found.rule == "overfitting"
    assert "mean of two evaluations, fell from 88.0% at step 600 to 84.0%" in found.text
    assert rules_of(run(0.8, 0.9, 0.85, 0.89)) == ["healthy"]
    # One evaluation of a healthy run is high by chance.
    assert rules_of(run(0.61, 0.59, 0.715, 0.675, 0.815, 0.74, 0.78, 0.77)) == ["healthy"]


def test_a_loss_above_that_of_a_network_that_knows_nothing_is_a_plateau_although_the_cosine_rose() -> None:
    head = HeadConfig(margin="cosface", margin_size=0.2, scale=32.0)
    limit = loss_without_knowledge(head, 16)
    assert limit == pytest.approx(math.log(1 + 15 * math.exp(32 * 0.2)))
    for last, cosine, rule in (
        (1.3 * limit, 0.18, "low cosine"),
        (0.9 * limit, 0.18, "healthy"),
        (1.3 * limit, 0.3, "healthy"),
    ):
        run = ModelReport(
            name="run",
            metrics=rows([last + 8 * 0.8**i for i in range(40)], target_cosine=cosine),
            cosines=cosine_range(head, 16),
            loss_without_knowledge=limit,
        )
        assert [one.rule for one in verdict(run)] == [rule]
    arcface = HeadConfig(margin="arcface", margin_size=0.5, scale=64.0)
    assert loss_without_knowledge(arcface, 1001) == pytest.approx(64 * math.sin(0.5) + math.log(1000))
    for other in (
        HeadConfig(margin="uniface"),
        HeadConfig(max_labels=3, margin="softmax"),
        HeadConfig(loss="decoupled"),
    ):
        assert loss_without_knowledge(other, 16) is None
    assert loss_without_knowledge(head, None) is None


def test_a_run_that_failed_and_was_resumed_is_judged_by_its_last_start() -> None:
    start, resume = ({"time": 1.0, "event": name, "step": 0} for name in ("start", "resume"))
    failed = {"time": 2.0, "event": "end", "step": None, "outcome": "failed", "text": "OSError: disk full"}
    assert rules_of(rows(FALLING), [start, failed]) == ["failed"]
    assert rules_of(rows(FALLING), [start, failed, resume]) == ["healthy"]


def test_the_needed_cosine_gives_half_of_the_softmax_to_the_own_class() -> None:
    for head, target in (
        (HeadConfig(margin="cosface", margin_size=0.2, scale=32.0), lambda c: 32 * (c - 0.2)),
        (HeadConfig(margin="arcface", margin_size=0.5, scale=64.0), lambda c: 64 * math.cos(math.acos(c) + 0.5)),
        (HeadConfig(margin="arcface", scale=64.0), lambda c: 64 * math.cos(math.acos(c) + 0.5)),
        (HeadConfig(margin="softmax", scale=30.0), lambda c: 30 * c),
        (HeadConfig(margin="of_the_user:NeverImported", scale=30.0), lambda c: 30 * c),
        (
            HeadConfig(margin="combined", m1=1.2, m2=0.3, m3=0.1),
            lambda c: 64 * (math.cos(1.2 * math.acos(c) + 0.3) - 0.1),
        ),
    ):
        own = math.exp(target(cosine_range(head, 1001).low))
        assert own / (own + 1000) == pytest.approx(0.5, abs=1e-6)
    assert gradient_range([100.0, *[2.0] * 19]).low == pytest.approx(0.2)
    assert gradient_range([1.0]) is None


def test_a_long_time_line_keeps_its_beginning_and_end() -> None:
    events = [{"time": 10.0 + i, "event": "save", "step": i, "seconds": 0.5} for i in range(500)]
    shown = time_line(events)
    assert len(shown) == 61 and shown[0] == ("0:00:00", "0", "save", "seconds 0.5")
    assert shown[-1][:2] == ("0:08:19", "499") and "440 events" in shown[30][3]
    assert time_line([]) == []


def draw(events: Any) -> str:
    return str(
        environment().get_template("evaluation/report/charts.html.j2").module.time_line(time_line_picture(events))
    )


def test_the_picture_of_the_events_has_a_lane_per_kind_and_marks_what_went_wrong() -> None:
    events = read(RECORDED / "runs" / "slow-rank").events
    picture = draw(events)
    lanes = {event["event"] for event in events}
    assert lanes == {"start", "slow_rank", "save", "end"}
    assert picture.count("<circle ") == len(events) and all(
        f">{lane.replace('_', ' ')}</text>" in picture for lane in lanes
    )
    assert picture.count("event bad") == sum(event["event"] == "slow_rank" for event in events)
    assert time_line_picture([]) == {} and time_line_picture([{"time": 1.0, "event": "<b>", "step": 1}]) == {}


def test_two_runs_are_drawn_smoothed_over_their_values_with_healthy_ranges_and_the_time_of_each_phase() -> None:
    folders = [RECORDED / "runs" / name for name in ("healthy", "slow-rank")]
    page = render_report(report_of_runs(folders, device=torch.device("cpu")))
    for title in ("Loss", "Cosine with the own centre", "Gradient norm of the centres"):
        chart = page.partition(f'aria-label="{title}"')[2].partition("</svg>")[0]
        assert chart.count("faint") == 2 and chart.count('class="line') == 4, title
        assert chart.count('class="band"') == (title != "Loss")
    assert "ends in the shaded range, from 0.28 on" in page and "a factor of ten around its median" in page
    # Both ranks of the second run have a bar; the slow one needs 30 ms more in forward, for which the other one waits.
    assert page.count('aria-label="rank 0: data') == 2 and page.count('aria-label="rank 1: data') == 1
    for part in ("waiting for data", "forward", "backward", "update", "exchange", "evaluating", "saving and other"):
        assert f"</i>{part} " in page
