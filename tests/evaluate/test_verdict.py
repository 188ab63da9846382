"""The rules of the verdict, each on rows that show it, and a healthy run on which none applies."""

from pathlib import Path
from typing import Any

import pytest

from megaclass.evaluate.report.time_line import time_line
from megaclass.evaluate.report.verdict import RULES, verdict
from megaclass.metrics_file import read_metrics


def rows(losses: list[float | None], **columns: Any) -> list[dict[str, Any]]:
    return [{"step": 20 * (i + 1), "loss": loss, **columns} for i, loss in enumerate(losses)]


FALLING = [40 * 0.9**i + 2 for i in range(40)]
RISING = [*FALLING[:15], *(FALLING[15] * 1.1**i for i in range(25))]
CASES: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]], str]] = {
    "hang": (rows(FALLING), [{"time": 1.0, "event": "hang", "step": 1234}], "hung at step 1,234"),
    "not finite": (rows(FALLING, skipped_steps=1), [], "40 steps were skipped"),
    "rising loss": (rows(RISING), [], "learning rate too high: loss rose from step 3"),
    "flat loss": (rows([50.0] * 40), [], "hardly learns"),
    "waiting for data": (rows(FALLING, data_wait_share=0.24), [], "loader is the bottleneck: 24% waiting"),
    "slow rank": (rows(FALLING, rank_seconds={}), [{"time": 1.0, "event": "slow_rank", "step": 9}] * 9, "slow 9 times"),
}


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_speaks_on_a_run_that_shows_it_and_no_other_does(rule: str) -> None:
    metrics, events, text = CASES[rule]
    found = verdict(metrics, events)
    assert [one.rule for one in found] == [rule]
    assert text in found[0].text


def test_a_falling_noisy_loss_is_healthy_and_a_few_rows_are_not_judged() -> None:
    noisy = [loss * (1.1 if i % 2 else 0.9) for i, loss in enumerate(FALLING)]
    assert [one.text for one in verdict(rows(noisy, data_wait_share=0.02, skipped_steps=0))] == ["healthy"]
    assert "too short" in verdict(rows([9.0, 8.0, None]))[0].text


def test_a_long_time_line_keeps_its_beginning_and_end() -> None:
    events = [{"time": 10.0 + i, "event": "save", "step": i, "seconds": 0.5} for i in range(500)]
    shown = time_line(events)
    assert len(shown) == 61 and shown[0] == ("0:00:00", "0", "save", "seconds 0.5")
    assert shown[-1][:2] == ("0:08:19", "499") and "440 events" in shown[30][3]
    assert time_line([]) == []


def test_a_recorded_run_that_learned_is_healthy() -> None:
    # Five columns of: megaclass train demo backbone.name=slim synth.identities=16 synth.images_per_identity=16 synth.size=16
    # backbone.embedding_dim=32 train.global_batch=16 train.epochs=8 train.report_steps=4 optimizer.lr=0.05 (84 steps)
    rows, num_damaged = read_metrics(Path(__file__).parent / "recorded" / "healthy.jsonl")
    assert len(rows) == 21 and not num_damaged
    assert [one.rule for one in verdict(rows)] == ["healthy"]
