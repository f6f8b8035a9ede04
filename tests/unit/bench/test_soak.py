from __future__ import annotations

import pytest

from bench.soaking.faults import FaultKind
from bench.soaking.load import Served
from bench.soaking.memory import Sample, growth
from bench.soaking.texts import Answer, Difference, difference
from bench.soaking.verdict import FaultRecord, judge

EXPECTED = Answer("abcd", (1, 2, 3, 4), "length")


@pytest.mark.parametrize(
    ("got", "found"),
    [
        (Answer("abcd", (1, 2, 3, 4), "length"), Difference.NONE),
        (Answer("abd", (1, 2, 4), "length"), Difference.LOST),
        (Answer("abbcd", (1, 2, 2, 3, 4), "length"), Difference.DUPLICATED),
        (Answer("abxd", (1, 2, 9, 4), "length"), Difference.OTHER),
        (Answer("abdc", (1, 2, 4, 3), "length"), Difference.OTHER),
        (Answer("abc", (1, 2, 3, 4), "length"), Difference.TEXT),
        (Answer("abcd", (1, 2, 3, 4), "stop"), Difference.TEXT),
    ],
)
def test_differences_have_names(got: Answer, found: Difference) -> None:
    assert difference(EXPECTED, got) is found


def served(case: int = 0, answer: Answer = EXPECTED, error: str = "") -> Served:
    return Served(case, began=10.0, arrivals=[10.1, 10.2, 12.2], ended=12.3, answer=answer, error=error)


def test_a_clean_run_passes() -> None:
    faults = [FaultRecord(FaultKind.KILL_RANK, "worker-0", 11.0, 2.5), FaultRecord(FaultKind.KILL_RANK, "w", 90.0, 3.5)]
    verdict = judge(60, [served()], [EXPECTED], faults, [])
    assert verdict.passed
    (summary,) = verdict.faults
    assert (summary.count, summary.unrecovered, summary.recover_s_median, summary.recover_s_max) == (2, 0, 3.0, 3.5)
    assert summary.longest_pause_s == pytest.approx(2.0)
    assert verdict.ttft_ms_p50 == pytest.approx(100)
    assert verdict.total_ms_p99 == pytest.approx(2_300)


@pytest.mark.parametrize(
    ("answers", "faults"),
    [
        ([served(), served(error="502")], []),
        ([served(), served(answer=Answer("abd", (1, 2, 4), "length"))], []),
        ([served()], [FaultRecord(FaultKind.KILL_REDIS, "redis", 11.0, None)]),
        ([], []),
    ],
)
def test_an_error_a_wrong_answer_an_unrecovered_fault_or_no_request_fails(
    answers: list[Served], faults: list[FaultRecord]
) -> None:
    assert not judge(60, answers, [EXPECTED], faults, []).passed


def _private_mib(age: float) -> float:
    return 100 + min(age, 30) * 2 + age / 100


def test_growth_leaves_the_warm_up_out_and_counts_lives() -> None:
    def life(pid: int, start: float) -> list[Sample]:
        # 60 MiB appear while it warms up, then 36 MiB per hour; its share of shared pages does what it likes.
        return [
            Sample("gateway", (pid, start), start + age, (200 + age % 7) * 2**20, int(_private_mib(age) * 2**20))
            for age in range(0, 101, 5)
        ]

    (row,) = growth(life(1, 0.0) + life(2, 500.0))
    assert (row.kind, row.lives, row.observed_s) == ("gateway", 2, 140)
    assert row.mib_per_hour == pytest.approx(36, rel=1e-3)
    assert row.last_mib == 202
