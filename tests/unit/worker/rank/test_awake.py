"""Where the weights of a rank that sleeps are, and from where they come back."""

from __future__ import annotations

import errno
import gc
from unittest.mock import Mock

import pytest

from services.compute.backends.base import Memory, ParkingMemory
from services.worker.rank.awake import Awake, LoadedModel, Sleeper


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
