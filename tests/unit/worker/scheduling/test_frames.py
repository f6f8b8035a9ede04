"""Frames of images: each is sent with the step that needs its first row, and its cost counts as rows do."""

from __future__ import annotations

import random

import pytest

from services.common.blockhash import ImageSpan
from services.worker.protocol.plan import Frame, StepPlan
from services.worker.scheduling.prefill_budget import PrefillBudget
from services.worker.scheduling.request import Request
from tests.unit.worker.scheduling.fake_ranks import generate
from tests.unit.worker.scheduling.harness import Harness

COST, ROWS = 40, 10  # cost and rows of a frame
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
    """Checks every plan: rows of a frame are computed only where the frame was sent in this admission."""

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.sent: dict[int, set[int]] = {}  # positions of frames, by slot
        self.n_frames: list[int] = []  # frames of each plan
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
            self.sent.pop(slot, None)
        for admission in plan.admissions:
            self.sent[admission.slot] = set()
        for slot, frame in plan.frames:
            assert frame.first not in self.sent[slot], "a frame is encoded once"
            self.sent[slot].add(frame.first)
        self.n_frames.append(len(plan.frames))
        self.work.append({request for request, _ in self.harness.scheduler.in_flight[-1].work})
        for request, chunk in self.harness.scheduler.in_flight[-1].work:
            for frame in request.frames:
                end = chunk.start + chunk.n_tokens
                if frame.first < end and chunk.start < frame.end:
                    assert frame.first in self.sent[chunk.slot]
                    assert not self.harness.config.frame_tokens or frame.end <= end, "a frame is cut"


def answer(request: Request, n: int = 4) -> list[int]:
    return generate(request.token_ids[: request.n_prompt], n, request.sampling)


@pytest.mark.parametrize("whole", [0, ROWS])
@pytest.mark.parametrize("rows", [16, 45, 64, 90, 500])
def test_frames_are_sent_once_within_the_steps_budget(rows: int, whole: int) -> None:
    harness = Harness(max_batched_tokens=rows, frame_cost=COST, frame_tokens=whole, max_running=4, n_blocks=80)
    requests = [submit(harness, n, bytes([n])) for n in (1, 5, 3)]
    texts = [harness.submit([40, 41, index]) for index in range(3)]
    watch = Watch(harness)
    watch.drain()
    assert max(watch.n_frames) <= rows // COST + 2
    assert sum(watch.n_frames) == 9
    for request in (*requests, *texts):
        assert harness.answers[request] == answer(request)


@pytest.mark.parametrize("whole", [0, ROWS])
def test_decodes_go_on_beside_frames_that_exceed_the_budget(whole: int) -> None:
    """A neighbour gets a token in every step, and no step encodes more than one frame."""
    harness = Harness(max_batched_tokens=64, frame_cost=COST, frame_tokens=whole, max_running=4, n_blocks=80)
    text = harness.submit([40, 41, 42], max_tokens=30)
    harness.step()
    harness.scheduler.prefill_budget = PrefillBudget(16)  # a frame costs more
    pictures = submit(harness, 6)
    watch = Watch(harness)
    watch.drain()
    assert max(watch.n_frames) == 1
    assert sum(watch.n_frames) == 6
    assert all(text in work for work, n_frames in zip(watch.work, watch.n_frames, strict=True) if n_frames)
    assert harness.answers[text] == answer(text, 30)
    assert harness.answers[pictures] == answer(pictures)


def test_frame_waits_for_a_step_with_room_for_all_of_its_rows() -> None:
    """Decodes take most rows of each step until they end; the prompt with the frame is computed after that."""
    harness = Harness(max_batched_tokens=ROWS + 1, frame_cost=1, frame_tokens=ROWS, max_running=4, n_blocks=80)
    texts = [harness.submit([40, index], max_tokens=6) for index in range(3)]
    for _ in range(4):
        harness.step()
    pictures = submit(harness, 2)
    watch = Watch(harness)
    watch.drain()
    assert sum(watch.n_frames) == 2
    assert harness.answers[pictures] == answer(pictures)
    assert [harness.answers[text] for text in texts] == [answer(text, 6) for text in texts]


def test_cached_frames_are_not_encoded_again() -> None:
    harness = Harness(max_batched_tokens=500, frame_cost=COST, n_blocks=80)
    first = submit(harness, 5)
    Watch(harness).drain()
    again, other = submit(harness, 5), submit(harness, 5, b"b")
    watch = Watch(harness)
    watch.drain()
    n_cached = again.cached_tokens
    assert n_cached == (first.n_prompt - 1) // 16 * 16
    expected = [frame.first for frame in again.frames if frame.end > n_cached]
    assert 0 < len(expected) < 5
    assert sum(watch.n_frames) == len(expected) + 5
    assert other.cached_tokens == 0, "another image of the same size"


@pytest.mark.parametrize("whole", [0, ROWS])
@pytest.mark.parametrize("seed", range(5))
def test_preempted_request_encodes_its_frames_again(seed: int, whole: int) -> None:
    rng = random.Random(seed)
    harness = Harness(max_batched_tokens=64, frame_cost=COST, frame_tokens=whole, max_running=4, n_blocks=12)
    requests = [submit(harness, rng.randrange(1, 6), bytes([n]), max_tokens=40) for n in range(6)]
    watch = Watch(harness)
    watch.drain()
    assert harness.scheduler.counters.preemptions > 0
    for request in requests:
        assert harness.answers[request] == answer(request, 40)
