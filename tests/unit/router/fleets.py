"""Snapshots, queries and pools to decide about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st
from ryzanstein.v1 import worker_pb2 as pb

from services.router.breaker import BreakerLimits
from services.router.pool import Pool
from services.router.snapshot import IneligibleReason, Query, Snapshot, hash64
from services.router.speeds import ReportedSpeeds, speeds_of

LIMITS = BreakerLimits()


@dataclass(frozen=True)
class LabWorker:
    queued: float = 0.0
    load: float = 0.0
    rate: float = 10_000.0
    step_ms: float = 20.0
    why_not: int = 0
    share: float = 1.0
    excess: float = 0.0
    load_share: float = 1.0
    max_tokens: float = 0.0
    kv_bytes: float = 0.0
    pull_rate: float = 0.0


def snapshot_of(workers: Sequence[LabWorker]) -> Snapshot:
    ids = tuple(f"w{i}" for i in range(len(workers)))
    return Snapshot(
        worker_ids=ids,
        identities=np.array([hash64(i) for i in ids], dtype=np.uint64),
        why_not=np.array([w.why_not for w in workers], dtype=np.uint8),
        queued_tokens=np.array([w.queued for w in workers], dtype=float),
        load=np.array([w.load for w in workers], dtype=float),
        busy=True,
        share=np.array([w.share for w in workers], dtype=float),
        excess=np.array([w.excess for w in workers], dtype=float),
        load_share=np.array([w.load_share for w in workers], dtype=float),
        speeds=speeds_of(
            ReportedSpeeds(
                prefill_rate=np.array([w.rate for w in workers], dtype=float),
                token_s=np.array([1 / w.rate if w.rate else 0 for w in workers], dtype=float),
                step_ms=np.array([w.step_ms for w in workers], dtype=float),
                step_batch=np.ones(len(workers)),
                step_age_s=np.zeros(len(workers)),
                probed=np.zeros(len(workers), dtype=bool),
                max_request_tokens=np.array([w.max_tokens for w in workers], dtype=float),
                kv_bytes_per_token=np.array([w.kv_bytes for w in workers], dtype=float),
                pull_bytes_per_s=np.array([w.pull_rate for w in workers], dtype=float),
            )
        ),
    )


hard_verdicts = st.sampled_from([0, 0, 0, *(int(w) for w in IneligibleReason if 0 < w < IneligibleReason.TOO_SMALL)])
workers = st.builds(
    LabWorker,
    queued=st.integers(0, 200_000).map(float),
    load=st.integers(0, 300).map(float),
    rate=st.integers(100, 100_000).map(float),
    step_ms=st.floats(1, 200),
    why_not=hard_verdicts,
    share=st.sampled_from([0.0, 0.9, 1.0, 1.01, 1.06, 2.0]),
    excess=st.sampled_from([0.0, 100.0, 1e6]),
    load_share=st.sampled_from([0.0, 0.9, 1.0, 1.1, 2.0]),
    max_tokens=st.sampled_from([0.0, 1000.0, 100_000.0]),
    kv_bytes=st.sampled_from([0.0, 1e4, 1e5]),
    pull_rate=st.sampled_from([0.0, 1e7, 1e9]),
)
fleets = st.lists(workers, min_size=1, max_size=12)


@st.composite
def situations(draw: st.DrawFn) -> tuple[Snapshot, Query]:
    """A fleet and a request that knows some of it."""
    snapshot = snapshot_of(draw(fleets))
    n = len(snapshot.worker_ids)
    prompt = draw(st.integers(1, 20_000))
    matched = draw(st.none() | st.lists(st.integers(0, prompt), min_size=n, max_size=n))
    query = Query(
        prompt_tokens=prompt,
        max_tokens=draw(st.integers(0, 5000)),
        request_key=draw(st.integers(0, 2**64 - 1)),
        session_key=draw(st.sampled_from([0, 1, 12345, 2**64 - 1])),
        bound=draw(st.integers(-1, n - 1)),
        bindings_known=draw(st.booleans()),
        matched_tokens=None if matched is None else np.array(matched, dtype=float),
        excluded=tuple(draw(st.sets(st.integers(0, n - 1)))),
        turn=draw(st.integers(0, 10_000)),
    )
    return snapshot, query


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Lab:
    """A pool under a clock that tests move."""

    clock: Clock = field(default_factory=Clock)
    pool: Pool = field(init=False)

    def __post_init__(self) -> None:
        self.pool = Pool("tiny", saturation_s=30.0, clock=self.clock)

    def join(self, worker_id: str, **fields: object) -> None:
        self.pool.add(worker_id, f"{worker_id}:1", LIMITS)
        self.tell(worker_id, **fields)

    def tell(self, worker_id: str, **fields: object) -> None:
        known: dict[str, object] = {
            "worker_id": worker_id,
            "incarnation": "first",
            "phase": pb.PHASE_SERVING,
            "prefill_tokens_per_s": 10_000,
            "decode_step_ms": 20,
        }
        self.pool.update(worker_id, pb.WorkerState(**{**known, **fields}), "router")  # type: ignore[arg-type]

    def why_not(self, worker_id: str) -> IneligibleReason:
        snapshot = self.pool.snapshot()
        return IneligibleReason(int(snapshot.why_not[snapshot.worker_ids.index(worker_id)]))

    def queued(self, worker_id: str) -> float:
        snapshot = self.pool.snapshot()
        return float(snapshot.queued_tokens[snapshot.worker_ids.index(worker_id)])
