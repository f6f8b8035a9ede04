from __future__ import annotations

import pytest

from bench.soaking.faults import FaultKind
from bench.soaking.load import Served
from bench.soaking.texts import Answer, Difference, difference
from bench.soaking.verdict import FaultRecord, judge

EXPECTED = Answer("abcd", (1, 2, 3, 4), "length")


@pytest.mark.parametrize(
    ("got", "actual"),
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
def test_differences_have_names(got: Answer, actual: Difference) -> None:
    assert difference(EXPECTED, got) is actual


def served(case: int = 0, answer: Answer = EXPECTED, error: str = "") -> Served:
    return Served(case, began=10.0, arrivals=[10.1, 10.2, 12.2], ended=12.3, answer=answer, error=error)


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
    assert judge(60, [served()], [EXPECTED], [FaultRecord(FaultKind.KILL_RANK, "w", 11.0, 2.5)], []).passed
