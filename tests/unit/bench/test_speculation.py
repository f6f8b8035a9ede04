"""A bench of speculation compares answers byte for byte, and speeds round by round."""

from __future__ import annotations

from collections import Counter

from bench.speculation_report import Answer, Cell, Run, Totals, drafts
from bench.speculation_workloads import repeated_share


def run(text: str, seconds: float) -> Run:
    return Run([Answer(text, 12, "stop")], seconds, Totals(Counter(suffix=8), Counter(suffix=6), prompts_s=0.5))


def test_a_cell_reports_the_ratio_of_each_round_and_each_different_text() -> None:
    cell = Cell("edit", 1, on=[run("abc", 1.0), run("abd", 2.0)], off=[run("abc", 3.0), run("abc", 4.0)])
    assert cell.ratio == 2.5  # 3 and 2
    assert cell.decode_ratio == (5 + 7 / 3) / 2  # 2.5 / 0.5 and 3.5 / 1.5
    (line,) = cell.differences()
    assert line.startswith("edit, alone, round 2, request 0: after 2 characters 'd' (12 tokens, stop) and 'c'")
    assert drafts(cell.on) == "suffix 12 of 16 (75%)"


def test_the_repeated_share_counts_runs_of_eight_words() -> None:
    source = "a b c d e f g h i j"
    assert repeated_share(source, "a b c d e f g h i x") == 2 / 3
    assert repeated_share(source, "a b c") == 0.0
