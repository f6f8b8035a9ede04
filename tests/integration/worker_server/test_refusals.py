"""`ryzanstein check` refuses a model in the words of a worker that refuses to start with it."""

from __future__ import annotations

import pytest

from services.common.lifecycle import StartupError
from services.worker.process.failure import FailureKind, RankFailure
from tests.integration.worker_server.conftest import running_worker
from tests.integration.worker_server.gateway import until

NOWHERE = {"a": "/no/such", "b": "/no/such"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"adapter_pins": ["x"]}, "RYZANSTEIN_ADAPTER_PINS x: not a name in RYZANSTEIN_ADAPTERS"),
        ({"adapters": NOWHERE}, "RYZANSTEIN_ADAPTERS a: /no/such: "),
        (
            {"adapters": NOWHERE, "adapter_pins": ["a", "b"], "adapter_slots": 2},
            "RYZANSTEIN_ADAPTER_PINS: 2 adapters; at most 1 of the 2 slots (RYZANSTEIN_ADAPTER_SLOTS)",
        ),
    ],
)
async def test_settings_of_adapters_are_refused_by_name(
    redis_url: str, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(StartupError) as refused:
        async with running_worker(redis_url, **settings):
            pass
    assert message in str(refused.value)


async def test_ranks_that_do_not_start_at_first_end_the_worker(redis_url: str) -> None:
    with pytest.raises(StartupError, match="the ranks did not start: rank 0 error: no weights"):  # noqa: PT012
        async with running_worker(redis_url, hold_start=True) as worker:
            worker.group.start_failure = RankFailure(0, FailureKind.ERROR, "no weights")
            worker.group.may_start.set()
            await until(worker.task.done)
