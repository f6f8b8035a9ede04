"""Server and rank at both ends of the shared memory, here in one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.compute.ranks.config import RankGroupConfig
from services.worker.ipc.doorbell import Doorbell, DoorbellButton
from services.worker.process.launcher import rank_environment
from services.worker.process.link import GroupLink
from services.worker.protocol.event_codec import RankError, decode_event, encode_event, encode_stop
from services.worker.protocol.order_codec import AdapterOrder, encode_order
from services.worker.protocol.plan import StepPlan
from services.worker.protocol.plan_codec import encode_plan
from services.worker.protocol.words import MalformedMessageError
from services.worker.rank import link as rank_link
from services.worker.rank.link import ServerGoneError, ServerLink
from tests.integration.worker_ranks.conftest import STANDIN

ERROR = encode_event(RankError(0, 1, "an error", "Traceback " * 100))


@pytest.fixture
def ends() -> tuple[GroupLink, ServerLink]:
    server = GroupLink(RankGroupConfig("well-behaved", kv_tokens=1024, dtype="float32", rank_module=STANDIN))
    return server, ServerLink(server.settings, 0)


def test_messages_beyond_the_rings_room_wait_and_keep_their_order(ends: tuple[GroupLink, ServerLink]) -> None:
    server, rank = ends
    assert not rank.waits(0)
    for number in range(3000):
        server.send(encode_order(number, AdapterOrder(0, "/adapter" * 500, forget=("b",))))
    server.send(encode_plan(StepPlan(7)))
    server.send(encode_stop())
    assert rank.waits(0)
    numbers = []
    while isinstance((received := rank.receive()).plan, AdapterOrder):
        numbers.append(received.number)
        list(server.messages())  # gives what waits the room that is there now
    assert numbers == list(range(3000))
    assert received.plan is not None
    assert rank.receive().plan is None


def test_a_message_of_another_kind_is_no_plan(ends: tuple[GroupLink, ServerLink]) -> None:
    server, rank = ends
    server.send(ERROR)
    with pytest.raises(MalformedMessageError, match=r"a message of kind \d+ where a plan must be"):
        rank.receive()


def test_rank_ends_when_its_server_stops_reading_or_is_gone(
    ends: tuple[GroupLink, ServerLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, rank = ends
    monkeypatch.setattr(rank_link, "_ROOM_TIMEOUT_S", 0.02)

    def fill() -> None:
        while True:
            rank.send(ERROR)

    with pytest.raises(ServerGoneError, match=r"the server read nothing for 0.02 s"):
        fill()
    assert {decode_event(words) for _, words in server.messages()} == {RankError(0, 1, "an error", "Traceback " * 100)}
    monkeypatch.setattr(os, "getppid", lambda: 1)
    with pytest.raises(ServerGoneError, match="the parent is gone"):
        fill()


def test_a_bell_that_was_rung_too_often_still_rings() -> None:
    bell = Doorbell()
    button = DoorbellButton(os.getpid(), bell.write_fd)
    for _ in range(70_000):  # more than a pipe holds
        button.ring()
    assert len(os.read(bell.read_fd, 1)) == 1
    bell.close()


def test_a_rank_that_fails_says_why_and_ends_with_1() -> None:
    server = GroupLink(RankGroupConfig("well-behaved", kv_tokens=10**12, dtype="float32", rank_module=STANDIN))
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}  # torchrun's variables
    environment = rank_environment(server.settings, 1) | alone
    done = subprocess.run([sys.executable, "-m", STANDIN], env=environment, cwd=Path(__file__).parents[3], check=False)
    assert done.returncode == 1
    *_, (_, words) = server.messages()  # after those of its progress
    event = decode_event(words)
    assert isinstance(event, RankError)
    assert "NotEnoughMemoryError: a KV cache of 62500000000 blocks" in event.error
    assert event.traceback.startswith("Traceback")
