"""The heat map of ranks: a slow rank is hot when it was slow, with its phase; content that is no table of ranks is left out."""

import json
import re

import pytest
import torch

from megaclass.evaluation.report.from_runs import report_of_runs
from megaclass.evaluation.report.page import render_report, write_report
from megaclass.evaluation.report.ranks import heat_map, rank_rows


def row(step: int, slow: float = 1.0, size: int = 4):
    """Rank 2 takes `slow` times as long for its data; in exchanges the others wait for it."""
    table = {phase: [0.1] * size for phase in ("data", "forward", "backward", "update")}
    table["data"] = [0.1 + 0.4 * (slow - 1) * (rank == 2) for rank in range(size)]
    return {"step": step, "rank_seconds": {**table, "exchange": [0.5] * size}}


def test_the_heat_map_shows_which_rank_was_slow_and_when(tmp_path):
    rows = [row(step, slow=1.6 if 40 <= step <= 60 else 1.0) for step in range(20, 120, 20)]
    lines = heat_map(rank_rows(rows))
    assert [(name, len(cells)) for name, cells in lines] == [(f"rank {rank}", 5) for rank in range(4)]
    hot = [
        (4, "rank 2, step 40: 1.60 × the median, most in data"),
        (4, "rank 2, step 60: 1.60 × the median, most in data"),
    ]
    assert [cell for _, cells in lines for cell in cells if cell[0]] == hot
    run = tmp_path / "run"
    (run / "profile").mkdir(parents=True)
    (run / "profile" / "rank-0.trace.json").write_text("{}")
    (run / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    write_report(tmp_path / "report.html", report_of_runs([run], device=torch.device("cpu")))
    page = (tmp_path / "report.html").read_text()
    text = "rank 2 is slow, most in data: in 2 of 5 reports it needed more than 20 % longer than the others, which wait for it."
    assert text in page
    assert page.count('<rect class="heat-') == 4 * 5
    assert re.findall(r'class="heat-4"[^>]*><title>([^<]*)', page) == [words for _, words in hot]
    assert '<a href="run/profile/rank-0.trace.json">rank-0.trace.json</a>' in page


@pytest.mark.parametrize(
    "table",
    [None, 3, {}, {"data": [1.0]}, {**row(1)["rank_seconds"], "data": ["x"] * 4}, {**row(1)["rank_seconds"], "data": [0.1]}],
)  # fmt: skip
def test_anything_else_in_place_of_the_table_is_left_out(tmp_path, table):
    assert rank_rows([{"step": 1, "rank_seconds": table}]) == []
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 1.0, "rank_seconds": table}) + "\n")
    assert "Ranks of" not in render_report(report_of_runs([tmp_path], device=torch.device("cpu")))


def test_many_ranks_and_rows_are_grouped_by_their_worst_and_the_number_of_ranks_may_change():
    rows = [row(step, slow=3.0 if step == 7 else 1.0, size=200 if step > 100 else 100) for step in range(300)]
    lines = heat_map(rank_rows(rows))
    assert [len(cells) for _, cells in lines] == [96] * 64
    cells = [cell for _, line in lines for cell in line]
    assert [words for level, words in cells if level == 5] == ["rank 2, step 7: 3.00 × the median, most in data"]
    assert (0, "no such rank then") in cells
