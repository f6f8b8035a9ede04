"""Orders to three ranks that answer when the test says so."""

from __future__ import annotations

import asyncio
from collections import deque
from itertools import pairwise

import numpy as np
import pytest

from services.worker.process.block_copies import BlockCopies
from services.worker.process.orders import Orders
from services.worker.protocol.order_codec import AdapterOrder, CopyOrder, Order, decode_order
from services.worker.protocol.words import read_words

RANKS = 3
LOAD = AdapterOrder(0, "/adapter")
COPY = CopyOrder(True, np.array([1], np.int32))


class Group:
    """The ranks' end: the orders that were sent."""

    def __init__(self) -> None:
        self.sent: asyncio.Queue[tuple[int, Order]] = asyncio.Queue()
        self.orders = Orders(RANKS, lambda message: self.sent.put_nowait(decode_order(read_words(message))))

    def answer(self, number: int, *errors: str) -> None:
        for rank, error in enumerate(errors):
            self.orders.answered(rank, number, error)


@pytest.fixture
async def group() -> Group:
    return Group()


async def test_order_ends_with_the_last_answer_and_the_first_error(group: Group) -> None:
    first, second = group.orders.send(LOAD), group.orders.send(COPY)
    (number, order), (later, _) = [await group.sent.get() for _ in range(2)]
    assert order == LOAD
    group.answer(number, "", "no slot")
    group.answer(later, "", "", "")
    assert (first.done(), await second, len(group.orders)) == (False, "", 1)
    group.orders.answered(2, number, "no file")
    assert (await first, len(group.orders)) == ("no slot", 0)


async def test_lost_ranks_fail_orders_in_progress_and_later_orders(group: Group) -> None:
    pending = group.orders.send(LOAD)
    group.orders.fail(ConnectionError("the ranks are lost"))
    for answer in (pending, group.orders.send(COPY)):
        with pytest.raises(ConnectionError, match="the ranks are lost"):
            await answer
    assert (group.sent.qsize(), len(group.orders)) == (1, 0)


async def test_unexpected_answer_is_refused(group: Group) -> None:
    with pytest.raises(ValueError, match="rank 0 answers an order that was not given: 5"):
        group.answer(5, "")
    group.orders.send(LOAD)
    number, _ = await group.sent.get()
    group.answer(number, "")
    with pytest.raises(ValueError, match=f"rank 0 answers an order that was not given: {number}"):
        group.answer(number, "")


async def test_cancelled_copy_holds_the_staging_area_until_all_ranks_have_answered(group: Group) -> None:
    areas = [memoryview(bytearray(4)) for _ in range(RANKS)]
    copies = BlockCopies(areas, group.orders.send)
    read = asyncio.create_task(copies.read([1], 2))
    write = asyncio.create_task(copies.write([2], [b"aabbcc"]))
    number, _ = await group.sent.get()
    read.cancel()
    await asyncio.wait((read,))
    group.answer(number, "", "")
    await asyncio.sleep(0)
    assert [bytes(area) for area in areas] == [bytes(4)] * RANKS
    group.orders.answered(2, number, "")
    number, _ = await group.sent.get()
    assert [bytes(area) for area in areas] == [b"aa\0\0", b"bb\0\0", b"cc\0\0"]
    group.answer(number, "", "", "")
    await write


async def test_copied_contents_are_collected_before_the_next_copy_begins(group: Group) -> None:
    areas = [memoryview(bytearray(part)) for part in (b"ab", b"cd", b"ef")]
    copies = BlockCopies(areas, group.orders.send)
    read = asyncio.create_task(copies.read([1], 2))
    write = asyncio.create_task(copies.write([2], [b"uvwxyz"]))
    group.answer((await group.sent.get())[0], "", "", "")
    assert await read == [b"abcdef"]
    group.answer((await group.sent.get())[0], "", "", "")
    await write
    assert [bytes(area) for area in areas] == [b"uv", b"wx", b"yz"]


async def test_one_copy_at_most_lies_between_two_steps() -> None:
    """Two plans are in flight, and copies of four loads and of two tiers are asked for at once."""
    ring: deque[int] = deque([0, 0])  # numbers of orders; 0: a plan
    orders = Orders(1, lambda message: ring.append(decode_order(read_words(message))[0]))
    copies = BlockCopies([memoryview(bytearray(2))], orders.send)
    reads = [asyncio.create_task(copies.read([1], 2)) for _ in range(2)]
    writes = [asyncio.create_task(copies.write([1], [b"ab"])) for _ in range(4)]
    executed: list[int] = []
    while not all(task.done() for task in (*reads, *writes)):
        await asyncio.sleep(0)
        executed.append(ring.popleft())
        if executed[-1]:
            orders.answered(0, executed[-1], "")
        else:
            ring.append(0)
    assert sum(map(bool, executed)) == 6
    assert not any(one and other for one, other in pairwise(executed))
