"""Decisions as routers meet them, from a seed; and what every policy decided, as digests.

python -m tests.unit.router.trace    records decisions.txt anew; only when a policy is meant to decide otherwise
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from services.router.policies import make_policy
from services.router.snapshot import IneligibleReason, Query, Snapshot, why_not_for
from services.router.speeds import ReportedSpeeds, speeds_of

RECORD = Path(__file__).with_name("decisions.txt")
NAMES = ("cost", "round_robin", "weighted", "least_loaded", "session_hash")
SEED, SNAPSHOTS, QUERIES = 20_261_126, 600, 10
PER_DIGEST = 500
# Device rates and decode steps of one pool: all alike, or two generations side by side.
_SPEEDS = ((8_000.0, 12.0), (30_000.0, 7.0), (2_000.0, 30.0))
_HARD = np.array(
    [why for why in IneligibleReason if IneligibleReason.ELIGIBLE < why < IneligibleReason.TOO_SMALL], dtype=np.uint8
)


def _chance(rng: np.random.Generator, n: int, share: float) -> NDArray[np.bool_]:
    return rng.random(n) < share


def _snapshot(rng: np.random.Generator) -> Snapshot:
    """A pool of 1 to 200 workers: idle, busy or drowning, some of them out for one reason or another."""
    n = int(200 ** rng.random()) if rng.random() < 0.9 else int(rng.integers(1, 201))
    busy, mixed = rng.random() < 0.6, rng.random() < 0.3
    kinds = rng.integers(0, len(_SPEEDS), n) if mixed else np.full(n, rng.integers(0, len(_SPEEDS)))
    rate, step_ms = np.array(_SPEEDS)[kinds].T * rng.uniform(0.7, 1.4, (2, n))
    unmeasured = _chance(rng, n, 0.05)
    load = rng.integers(0, 64, n) * (rng.random(n) < 0.9) if busy else rng.integers(0, 4, n)
    queued = rng.exponential(rng.choice([50.0, 2_000.0, 40_000.0]), n) * _chance(rng, n, 0.8 if busy else 0.2)
    share = rng.gamma(8.0, 1 / 8.0, n) if busy else np.ones(n)
    out = _chance(rng, n, rng.choice([0.0, 0.0, 0.1, 0.6, 1.0], p=[0.4, 0.2, 0.25, 0.14, 0.01]))
    speeds = speeds_of(
        ReportedSpeeds(
            prefill_rate=np.where(unmeasured, 0.0, rate),
            token_s=np.where(unmeasured, 0.0, 1.0 / rate),
            step_ms=np.where(unmeasured, 0.0, step_ms),
            step_batch=np.maximum(load, 1.0),
            step_age_s=rng.exponential(5.0, n),
            probed=_chance(rng, n, 0.1),
            max_request_tokens=rng.choice([0.0, 4_096.0, 32_768.0], n),
            kv_bytes_per_token=np.full(n, rng.choice([0.0, 20_000.0, 130_000.0])),
            pull_bytes_per_s=np.full(n, rng.choice([0.0, 1e8, 2e9])),
            batch_doubles=rng.uniform(5.0, 100.0),
        )
    )
    return Snapshot(
        worker_ids=tuple(f"worker-{i}" for i in range(n)),
        identities=rng.integers(0, 1 << 64, n, dtype=np.uint64),
        why_not=np.where(out, rng.choice(_HARD, n), np.uint8(0)),
        queued_tokens=np.floor(queued),
        load=load.astype(float),
        busy=busy,
        share=share,
        excess=np.maximum(share - 1.0, 0.0) * rng.exponential(20_000.0),
        load_share=load / load.mean() if busy and load.any() else np.ones(n),
        speeds=speeds,
    )


def _queries(rng: np.random.Generator, n_workers: int) -> Iterator[Query]:
    """Requests for one pool: without a session, or with a session that is bound here, elsewhere, or unknown."""
    prompts = np.minimum(rng.lognormal(6.5, 1.2, QUERIES), 60_000.0).astype(int) + 1
    answers = rng.choice([0, 16, 128, 400, 4_000], QUERIES)
    keys = rng.integers(1, 1 << 64, (2, QUERIES), dtype=np.uint64).tolist()
    sticky, bound, known = (_chance(rng, QUERIES, share) for share in (0.75, 0.6, 0.85))
    homes = rng.integers(0, n_workers, QUERIES).tolist()
    looked_up, held = _chance(rng, QUERIES, 0.7), _chance(rng, QUERIES, 0.8)
    holders = _chance(rng, QUERIES * n_workers, 0.15).reshape(QUERIES, n_workers)
    depths = rng.uniform(0.0, 1.0, (QUERIES, n_workers)) * holders
    depths[np.arange(QUERIES)[held], np.array(homes)[held]] = 0.9
    excluded = _chance(rng, QUERIES, 0.1)
    turns = rng.integers(0, 1 << 20, QUERIES).tolist()
    for i in range(QUERIES):
        yield Query(
            prompt_tokens=int(prompts[i]),
            max_tokens=int(answers[i]),
            request_key=keys[0][i],
            session_key=keys[1][i] if sticky[i] else 0,
            bound=homes[i] if bound[i] else -1,
            bindings_known=bool(known[i]),
            matched_tokens=np.floor(depths[i] * prompts[i] / 16.0) * 16.0 if looked_up[i] else None,
            excluded=(homes[i], (homes[i] * 7 + 3) % n_workers) if excluded[i] else (),
            turn=turns[i],
        )


def situations() -> Iterator[tuple[Snapshot, Query]]:
    """All of them, in order."""
    rng = np.random.Generator(np.random.PCG64(SEED))
    for _ in range(SNAPSHOTS):
        snapshot = _snapshot(rng)
        for query in _queries(rng, len(snapshot.worker_ids)):
            yield snapshot, query


def digests() -> list[dict[str, str]]:
    """By policy, for every `PER_DIGEST` decisions: which worker, and the reason."""
    policies = {name: make_policy(name) for name in NAMES}  # type: ignore[arg-type]
    actual, hashes = [], {name: hashlib.sha256() for name in NAMES}
    for number, (snapshot, query) in enumerate(situations(), start=1):
        why_not = why_not_for(snapshot, query)
        for name, policy in policies.items():
            choice = policy.choose(snapshot, query, why_not)
            hashes[name].update(f"{choice.index} {choice.reason}\n".encode() if choice else b"nobody\n")
        if number % PER_DIGEST == 0:
            actual.append({name: sha.hexdigest()[:16] for name, sha in hashes.items()})
            hashes = {name: hashlib.sha256() for name in NAMES}
    return actual


def recorded() -> list[dict[str, str]]:
    """The recorded decisions."""
    header, *rows = RECORD.read_text().splitlines()
    return [dict(zip(header.split(), row.split(), strict=True)) for row in rows]


def main() -> None:
    """Write the record."""
    rows = [" ".join(NAMES), *(" ".join(row.values()) for row in digests())]
    RECORD.write_text("\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
