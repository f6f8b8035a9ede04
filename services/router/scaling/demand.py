"""The demand for a pool and what its workers can do, from what workers and routers report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from services.router.fleet import Fleet
from services.router.membership import Member
from services.router.scaling.decision import Demand, PoolCapacity
from services.router.scaling.peers import DemandByModel
from services.router.scaling.pools import ScaledPool, Scaling
from services.router.snapshot import IneligibleReason


@dataclass(frozen=True, slots=True)
class WorkerSpeed:
    """The measured speeds of one worker of a pool; 0: not measured."""

    prefill_rate: float = 0.0
    batch: float = 0.0
    kv_blocks: float = 0.0


class FleetView:
    """The fleet by pools of the chart instead of models: several pools may serve a model, and a pool several models."""

    def __init__(self, fleet: Fleet, informed: Callable[[], bool]) -> None:
        """`informed`: whether the leases of the workers have been read."""
        self._fleet = fleet
        self._informed = informed
        self._speeds: dict[str, WorkerSpeed] = {}  # by pool; kept while it has no worker

    def demand(self, pool: ScaledPool, scaling: Scaling, held: DemandByModel) -> Demand:
        """The demand for a pool. Held requests are those of the first pool of their model that may still grow."""
        members = [member for _, _, member in self._members(pool)]
        states = [member.state for member in members]
        parts = [held.models[model] for model in pool.models if model in held.models]
        own = [part for model, part in held.models.items() if self._grows_for(model, scaling) is pool]
        return Demand(
            held=sum(part.requests for part in own),
            held_tokens=sum(part.tokens for part in own),
            tokens_per_s=sum(
                part.tokens_per_s * self._share(pool, model, scaling)
                for model, part in held.models.items()
                if model in pool.models
            ),
            busy=sum(state.running + state.waiting for state in states),
            queued_tokens=sum(state.queued_prefill_tokens for state in states),
            kv_used=sum(state.kv_blocks_used for state in states),
            idle_s=min((part.idle_s for part in parts), default=0.0),
            complete=held.complete and self._informed() and all(member.connected for member in members),
        )

    def capacity(self, pool: ScaledPool, replicas: int) -> PoolCapacity:
        """The capacity of a pool of that many replicas."""
        speed = self._speeds[pool.name] = self._measured(pool)
        loads: dict[int, int] = {}  # requests, by ordinal
        for ordinal, _, member in self._members(pool):
            loads[ordinal] = loads.get(ordinal, 0) + member.state.running + member.state.waiting
        return PoolCapacity(
            replicas=replicas,
            workers=len(loads),
            prefill_rate=speed.prefill_rate,
            batch=speed.batch,
            kv_blocks=speed.kv_blocks,
            last_is_emptiest=loads.get(replicas - 1, 0) <= min(loads.values(), default=0),
        )

    def _members(self, pool: ScaledPool) -> Iterator[tuple[int, str, Member]]:
        """The pool's workers: the ordinals of their pods, and their models."""
        for model in pool.models:
            home = self._fleet.pools.get(model)
            for member in home.members.values() if home else ():
                if (ordinal := pool.ordinal(member.worker_id)) is not None:
                    yield ordinal, model, member

    def _grows_for(self, model: str, scaling: Scaling) -> ScaledPool | None:
        """The pool that grows for a model's held requests: the first that may, else the last."""
        pools = [pool for pool in scaling.pools if model in pool.models]
        growing = (pool for pool in pools if len({ordinal for ordinal, *_ in self._members(pool)}) < pool.max)
        return next(growing, pools[-1] if pools else None)

    def _share(self, pool: ScaledPool, model: str, scaling: Scaling) -> float:
        """The part of a model's placed requests that goes to the pool: that of its serving workers."""
        home = self._fleet.pools.get(model)
        serving = [m.worker_id for m in home.members.values() if m.verdict is IneligibleReason.ELIGIBLE] if home else []
        if not serving:
            return 1.0 if self._grows_for(model, scaling) is pool else 0.0
        return sum(pool.ordinal(worker_id) is not None for worker_id in serving) / len(serving)

    def _measured(self, pool: ScaledPool) -> WorkerSpeed:
        """The mean speed of the pool's workers; of what none has measured, the last known."""
        known = self._speeds.get(pool.name, WorkerSpeed())
        pools = self._fleet.pools
        speeds = {model: pools[model].snapshot().speeds for model in pool.models if model in pools}
        rates, batches, blocks = [], [], []
        for _, model, member in self._members(pool):
            of_model, state = speeds[model], member.state
            if state.prefill_tokens_per_s:
                rates.append(float(of_model.prefill_rate[member.index]))
            if state.decode_step_ms:
                at_target = pool.token_milliseconds / float(of_model.batch_ms[member.index])
                batches.append(max(at_target - of_model.batch_doubles, 1.0))
            if state.kv_blocks_total:
                blocks.append(float(state.kv_blocks_total))
        return WorkerSpeed(
            prefill_rate=_mean(rates, known.prefill_rate),
            batch=_mean(batches, known.batch),
            kv_blocks=_mean(blocks, known.kv_blocks),
        )


def _mean(values: list[float], default: float) -> float:
    return float(np.mean(values)) if values else default
