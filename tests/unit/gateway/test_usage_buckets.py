"""Buckets of time hold every second once, whatever the width, and pages hold every bucket once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.billing.account import Counts
from services.gateway.billing.buckets import WIDTHS, Retention, Width, start_of, starts
from services.gateway.billing.prices import Price, Prices, read_prices
from services.gateway.usage import PredictionUsage, Usage

TIMES = st.integers(min_value=0, max_value=10**10)
SPANS = st.integers(min_value=0, max_value=3 * 86_400)
EVERY = st.sampled_from(list(WIDTHS))


@given(TIMES, EVERY)
def test_bucket_holds_its_time_and_lies_in_one_bucket_of_each_wider_width(seconds: int, width: Width) -> None:
    start = start_of(seconds, width)
    assert start <= seconds < start + WIDTHS[width]
    for wider in WIDTHS:
        if WIDTHS[wider] >= WIDTHS[width]:
            assert start_of(start, wider) == start_of(seconds, wider)


@given(TIMES, SPANS, EVERY, st.integers(min_value=1, max_value=50))
def test_pages_hold_each_bucket_of_a_span_once(begin: int, span: int, width: Width, most: int) -> None:
    pages: list[int] = []
    following: int | None = begin
    while following is not None and len(pages) < 1000:
        shown, following = starts(following, begin + span, width, most)
        assert len(shown) <= most
        pages += shown
    expected = sorted({start_of(second, width) for second in range(begin, begin + span, 60)} if span else set())
    if span:
        expected = sorted({*expected, start_of(begin + span - 1, width)})
    assert pages == expected[: len(pages)]
    assert following is not None or len(pages) == len(expected)


@given(TIMES, SPANS, EVERY)
def test_oldest_bucket_is_the_oldest_with_time_left(now: int, stored: int, width: Width) -> None:
    retention = Retention(stored + 1, stored + 1, stored + 1)
    oldest = retention.oldest(width, now)
    assert retention.left_s(oldest, width, now) > 0
    assert retention.left_s(oldest - WIDTHS[width], width, now) <= 0


USAGES = st.builds(
    lambda cached, rest, output: Usage(cached + rest, output, cached),
    *(st.integers(min_value=0, max_value=10**7) for _ in range(3)),
)


@given(st.lists(USAGES, max_size=20), st.floats(0, 1e3), st.floats(0, 1e3), st.floats(0, 1e3))
def test_sums_of_costs_are_the_costs_of_sums(usages: list[Usage], prompt: float, cached: float, output: float) -> None:
    prices = Prices({"*": Price(input=prompt, cached_input=cached, output=output)})
    counts = sum((Counts.of(usage, prices.cost("m", usage)) for usage in usages), Counts())
    whole = prices.cost("m", sum(usages, Usage()))
    assert counts.cost / 1e9 == pytest.approx(whole.total, abs=3e-9 * (len(usages) + 1))
    assert counts.tokens == sum(usage.prompt_tokens + usage.completion_tokens for usage in usages)


def test_cached_tokens_have_the_price_of_input_by_default() -> None:
    prices = Prices(read_prices('{"a": {"input": 1, "output": 3}, "*": {"input": 2}}'))
    usage = Usage(10, 5, 4, PredictionUsage(1, 100))
    assert prices.cost("a", usage).total == pytest.approx(25e-6), "rejected tokens of a prediction cost nothing"
    assert prices.cost("other", usage).total == pytest.approx(20e-6)
    assert Prices().cost("a", usage).total == 0
    halved = Prices(read_prices('{"*": {"input": 1, "output": 3, "batch_factor": 0.5}}'))
    assert halved.cost("a", usage, batch=True).total == pytest.approx(12.5e-6)
    assert halved.cost("a", usage).total == pytest.approx(25e-6)
    assert halved.training_cost("a", 10) == 0
    assert Prices(read_prices('{"*": {"training": 2}}')).training_cost("a", 10) == 20_000


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[]", "object"),
        ('{"a": {"outptu": 1}}', "outptu"),
        ('{"a": {"input": -1}}', ">= 0"),
        ('{"a": {"batch_factor": 2}}', "<= 1"),
    ],
)
def test_wrong_prices_are_refused_by_name(text: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        read_prices(text)
