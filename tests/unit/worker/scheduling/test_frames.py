"""Frames of images: steps share the layers of a frame's tower, and each one's cost counts as rows do."""

from __future__ import annotations

import random

import pytest

from services.common.blockhash import ImageSpan
from services.worker.protocol.plan import Frame, StepPlan
from services.worker.scheduling.prefill_budget import PrefillBudget
from services.worker.scheduling.request import Request
from tests.unit.worker.scheduling.fake_ranks import generate
from tests.unit.worker.scheduling.harness import Harness

COST, ROWS, LAYERS = 40, 10, 8  # cost, rows and layers of a frame
PLACEHOLDER = 5


def pictured(n_frames: int, n_before: int = 7, n_between: int = 2) -> tuple[list[int], list[Frame]]:
    """A prompt with frames, and a text behind them."""
    ids, frames = list(range(20, 20 + n_before)), []
    for number in range(n_frames):
        frames.append(Frame(len(ids), ROWS, bytes([number])))
        ids += [PLACEHOLDER] * ROWS + [9] * n_between
    return [*ids, 30, 31], frames


def submit(harness: Harness, n_frames: int, digest: bytes = b"a", **fields: object) -> Request:
    ids, frames = pictured(n_frames)
    spans = [ImageSpan(frames[0].first, frames[-1].end, digest * 32)]
    return harness.submit(ids, frames=frames, images=spans, **fields)


class Watch:
    """Checks every plan: rows of a frame are computed only where this admission encoded it, in order."""

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.encoded: dict[int, dict[int, int]] = {}  # layers of frames, by slot and position
        self.n_layers: list[int] = []  # computed in each plan
        self.work: list[set[Request]] = []  # requests of each plan
        self._requests: dict[int, Request] = {}

    def drain(self) -> None:
        while True:
            while (plan := self.harness.plan()) is not None:
                self.check(plan)
            if not self.harness.in_flight:
                break
            self.harness.apply()
        self.harness.scheduler.check()

    def check(self, plan: StepPlan) -> None:
        for slot in plan.released:
            self.encoded.pop(slot, None)
        for admission in plan.admissions:
            self.encoded[admission.slot] = {}
        layers = self.harness.config.frame_layers
        for slot, frame, start, stop in plan.tower:
            of_slot = self.encoded[slot]
            assert of_slot.get(frame.first, 0) == start < stop <= layers, "each layer is computed once, in order"
            of_slot[frame.first] = stop
            assert sum(n < layers for of in self.encoded.values() for n in of.values()) <= 1, "two frames under way"
        self.n_layers.append(sum(work.n_layers for work in plan.tower))
        cost = sum(work.n_layers * work.frame.n_tokens for work in plan.tower) * self.harness.config.row_cost / layers
        single = (1 + (layers == 1)) * COST / layers
        assert cost <= max(self.harness.config.max_batched_tokens, single), "more layers than the step's rows pay for"
        self.work.append({request for request, _ in self.harness.scheduler.in_flight[-1].work})
        for request, chunk in self.harness.scheduler.in_flight[-1].work:
            for frame in request.frames:
                end = chunk.start + chunk.n_tokens
                if frame.first < end and chunk.start < frame.end:
                    assert self.encoded[chunk.slot][frame.first] == layers
                    assert not self.harness.config.frame_tokens or frame.end <= end, "a frame is cut"


def answer(request: Request, n: int = 4) -> list[int]:
    return generate(request.token_ids[: request.n_prompt], n, request.sampling)


@pytest.mark.parametrize("layers", [1, LAYERS])
@pytest.mark.parametrize("whole", [0, ROWS])
@pytest.mark.parametrize("rows", [16, 45, 64, 90, 500])
def test_frames_are_encoded_once_within_the_steps_budget(rows: int, whole: int, layers: int) -> None:
    sizes = {"row_cost": COST // ROWS, "frame_tokens": whole, "frame_layers": layers}
    harness = Harness(max_batched_tokens=rows, max_running=4, n_blocks=80, **sizes)
    requests = [submit(harness, n, bytes([n])) for n in (1, 5, 3)]
    texts = [harness.submit([40, 41, index]) for index in range(3)]
    watch = Watch(harness)
    watch.drain()
    assert sum(watch.n_layers) == 9 * layers
    for request in (*requests, *texts):
        assert harness.answers[request] == answer(request)


@pytest.mark.parametrize("layers", [1, LAYERS])
@pytest.mark.parametrize("whole", [0, ROWS])
def test_decodes_get_a_token_in_every_step_while_frames_are_encoded(whole: int, layers: int) -> None:
    """A frame costs more than the budget of a step, which encodes as many layers as it pays for, or one."""
    sizes = {"row_cost": COST // ROWS, "frame_tokens": whole, "frame_layers": layers}
    harness = Harness(max_batched_tokens=64, max_running=4, n_blocks=80, **sizes)
    text = harness.submit([40, 41, 42], max_tokens=60)
    harness.step()
    harness.scheduler.prefill_budget = PrefillBudget(16)
    pictures = submit(harness, 3), submit(harness, 3, b"b")
    watch = Watch(harness)
    watch.drain()
    assert max(watch.n_layers) == max(1, 16 * layers // COST)
    assert sum(watch.n_layers) == 6 * layers
    assert all(text in work for work, n_layers in zip(watch.work, watch.n_layers, strict=True) if n_layers)
    assert harness.answers[text] == answer(text, 60)
    assert [harness.answers[one] for one in pictures] == [answer(one) for one in pictures]


def test_frame_under_way_is_finished_before_a_more_important_frame() -> None:
    harness = Harness(max_batched_tokens=64, max_running=4, n_blocks=80, row_cost=COST // ROWS, frame_layers=LAYERS)
    text = harness.submit([40, 41, 42], max_tokens=200)
    harness.step()
    harness.scheduler.prefill_budget = PrefillBudget(6)
    ids, frames = pictured(1, n_before=40)
    major, minor = harness.submit(ids, frames=frames), submit(harness, 1, priority=1)
    while not minor.n_layers:
        harness.step()
    harness.scheduler.prefill_budget = PrefillBudget(1)  # the first of the prompts gets all of it
    while not {minor, major} <= harness.ended.keys():
        assert text not in harness.ended, "pictures wait for the end of a text"
        harness.step()
    assert [harness.answers[one] for one in (minor, major)] == [answer(minor), answer(major)]


@pytest.mark.parametrize("loss", ["cancel", "abandon", "preempt"])
def test_frame_that_is_lost_half_way_leaves_the_tower_free(loss: str) -> None:
    harness = Harness(max_batched_tokens=16, row_cost=COST // ROWS, frame_layers=LAYERS, max_running=1, n_blocks=80)
    first, watch = submit(harness, 2, priority=1), Watch(harness)
    while not first.n_layers:
        if (plan := harness.plan()) is None:
            harness.apply()
        else:
            watch.check(plan)
    assert first.n_in_flight == len(harness.in_flight) > 0, "a crash in the tower is one of its request"
    if loss == "cancel":
        harness.scheduler.cancel(first)
    elif loss == "abandon":
        assert harness.scheduler.abandon() == [first]
        harness.in_flight.clear()
        watch.encoded.clear()
        harness.ranks.slots.clear()
    others = [submit(harness, 2, b"b"), submit(harness, 1, b"c")]
    watch.drain()
    assert harness.scheduler.idle
    assert harness.scheduler.counters.preemptions == (loss == "preempt")
    for request in (*others, *([first] if loss == "preempt" else [])):
        assert harness.answers[request] == answer(request)


def test_prompt_that_begins_with_a_frame_gets_its_blocks_with_its_first_rows() -> None:
    """Another frame is under way first; a frame may be the last row of a prompt."""
    harness = Harness(max_batched_tokens=16, row_cost=COST // ROWS, frame_layers=LAYERS, max_running=4, n_blocks=80)
    ids, frames = pictured(2, n_before=0)
    spans = [ImageSpan(0, frames[-1].end, b"a" * 32)]
    requests = [harness.submit([*ids, n], frames=frames, images=spans, cacheable=False) for n in range(3)]
    last = harness.submit([20, 21, PLACEHOLDER], frames=[Frame(2, 1, b"x")])
    text = harness.submit([40, 41, 42])
    watch = Watch(harness)
    watch.drain()
    assert sum(watch.n_layers) == 7 * LAYERS
    for request in (*requests, last, text):
        assert harness.answers[request] == answer(request)


def test_frame_waits_for_a_step_with_room_for_all_of_its_rows() -> None:
    """Decodes take most rows of each step until they end; the prompt with the frame is computed after that."""
    harness = Harness(max_batched_tokens=ROWS + 1, row_cost=1, frame_tokens=ROWS, max_running=4, n_blocks=80)
    texts = [harness.submit([40, index], max_tokens=6) for index in range(3)]
    for _ in range(4):
        harness.step()
    pictures = submit(harness, 2)
    watch = Watch(harness)
    watch.drain()
    assert sum(watch.n_layers) == 2
    assert harness.answers[pictures] == answer(pictures)
    assert [harness.answers[text] for text in texts] == [answer(text, 6) for text in texts]


def test_cached_frames_are_not_encoded_again() -> None:
    harness = Harness(max_batched_tokens=500, row_cost=COST // ROWS, n_blocks=80)
    first = submit(harness, 5)
    Watch(harness).drain()
    again, other = submit(harness, 5), submit(harness, 5, b"b")
    watch = Watch(harness)
    watch.drain()
    n_cached = again.cached_tokens
    assert n_cached == (first.n_prompt - 1) // 16 * 16
    expected = [frame.first for frame in again.frames if frame.end > n_cached]
    assert 0 < len(expected) < 5
    assert sum(watch.n_layers) == len(expected) + 5
    assert other.cached_tokens == 0, "another image of the same size"


@pytest.mark.parametrize("layers", [1, LAYERS])
@pytest.mark.parametrize("whole", [0, ROWS])
@pytest.mark.parametrize("seed", range(5))
def test_preempted_request_encodes_its_frames_again(seed: int, whole: int, layers: int) -> None:
    rng = random.Random(seed)
    sizes = {"row_cost": COST // ROWS, "frame_tokens": whole, "frame_layers": layers}
    harness = Harness(max_batched_tokens=16 if layers > 1 else 64, max_running=4, n_blocks=12, **sizes)
    requests = [submit(harness, rng.randrange(1, 6), bytes([n]), max_tokens=40) for n in range(6)]
    watch = Watch(harness)
    watch.drain()
    assert harness.scheduler.counters.preemptions > 0
    for request in requests:
        assert harness.answers[request] == answer(request, 40)
