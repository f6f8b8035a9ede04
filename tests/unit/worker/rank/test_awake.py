"""Where the weights of a rank that sleeps are, and from where they come back."""

from __future__ import annotations

import errno
import gc
from unittest.mock import Mock, PropertyMock, call

import pytest

from services.compute.backends.base import Memory, ParkingMemory
from services.worker.rank.awake import Awake, LoadedModel, Sleeper
from services.worker.rank.link import Received
from services.worker.rank.loop import StepLoop


@pytest.mark.parametrize(
    ("memory", "level", "refusal", "parks"),
    [
        (ParkingMemory, 1, None, True),
        (ParkingMemory, 1, OSError(errno.ENOSPC, "the disk is full"), False),
        (ParkingMemory, 2, None, False),
        (Memory, 1, None, False),
    ],
    ids=["parked", "no-room", "level-2", "no-parking"],
)
def test_wake_has_the_parked_model_or_the_checkpoint(
    memory: type[Memory], level: int, refusal: OSError | None, parks: bool, caplog: pytest.LogCaptureFixture
) -> None:
    place, awake, models = Mock(spec=memory), Mock(), list[LoadedModel | None]()
    if memory is ParkingMemory:
        place.park.side_effect = refusal

    def rebuild(model: LoadedModel | None) -> Awake:
        models.append(model)
        return Mock()

    caplog.set_level("INFO")
    sleeper = Sleeper(awake, rebuild, place, Mock())
    for _ in range(2):
        sleeper.sleep(level)
    place.rest.assert_called_once_with()
    for _ in range(2):
        sleeper.wake()
    gc.unfreeze()
    assert models == [awake.model if parks else None]
    assert ("will read the checkpoint again" in caplog.text) is (refusal is not None)
    if parks:
        place.park.return_value.assert_called_once_with()
        awake.model.decoder.forget_cache.assert_called_once_with()
        awake.model.forget_adapters.assert_called_once_with()


def test_memory_that_a_wake_promises_is_published_until_its_intake() -> None:
    place, hold, woken = Mock(spec=Memory, **{"held.side_effect": [10, 30, 50, 70]}), Mock(), Mock()
    pages = iter([40, 20, 0])

    def take() -> None:
        woken.intake.left = next(pages)

    take()
    woken.intake.take.side_effect = take
    woken.intake.rest_s = 0.5
    sleeper = Sleeper(Mock(), lambda model: woken, place, hold)
    sleeper.sleep(1)
    gc.unfreeze()
    assert sleeper.rest_s is None, "asleep"
    sleeper.wake()
    gc.unfreeze()
    while sleeper.rest_s is not None:
        sleeper.take()
    assert hold.mock_calls == [call(10, 0), call(30, 40), call(50, 20), call(70, 0)]


@pytest.mark.parametrize(
    ("rests", "comes", "pages"),
    [([0.0, None], [], 1), ([0.5], [True], 0), ([0.5, 0.5, None], [False, False], 2), ([None], [], 0)],
    ids=["due", "message", "idle", "all-taken"],
)
def test_cache_takes_due_pages_and_a_message_comes_before_the_next(
    rests: list[float | None], comes: list[bool], pages: int
) -> None:
    sleeper, link = Mock(), Mock(**{"sleeps.side_effect": comes, "receive.return_value": Received(None, 0)})
    type(sleeper).rest_s = PropertyMock(side_effect=rests)
    StepLoop(link, sleeper).run()
    assert sleeper.take.call_count == pages
    assert link.sleeps.mock_calls == [call(0.5)] * len(comes)
