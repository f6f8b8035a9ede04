"""A simulated fleet in steady state: does stickiness cost balance?"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest

from services.router.policies import make_policy
from services.router.snapshot import Query, hash64, why_not_for
from tests.unit.router.fleets import Lab

TICK_S = 0.02  # simulation's tick, a decode step, and the pace of states
PREFILL_PER_TICK = 200
HOT_PREFIX = 1024


@dataclass
class SimulatedWorker:
    prefills: list[list[int]] = field(default_factory=list)  # [tokens left, tokens to generate]
    decodes: list[int] = field(default_factory=list)
    cached: Counter[str] = field(default_factory=Counter)
    work: int = 0
    acked: int = 0

    def step(self) -> None:
        budget = PREFILL_PER_TICK
        while self.prefills and budget:
            done = min(budget, self.prefills[0][0])
            self.prefills[0][0] -= done
            budget -= done
            self.work += done
            if not self.prefills[0][0]:
                self.decodes.append(self.prefills.pop(0)[1])
        self.work += len(self.decodes)
        self.decodes = [left - 1 for left in self.decodes if left > 1]


class Simulation:
    """Eight equal workers at about 70 % load; one tenant of eight sends half of the requests, behind one prompt."""

    def __init__(self, policy: str, seed: int, n_workers: int = 8) -> None:
        self.random = random.Random(seed)
        self.policy = make_policy(policy)  # type: ignore[arg-type]
        self.lab = Lab()
        self.workers = {f"worker-{i}": SimulatedWorker() for i in range(n_workers)}
        self.bindings: dict[int, str] = {}
        self.seq = 0
        self.kept = self.sticky = 0
        for worker_id in self.workers:
            self.lab.join(worker_id)

    def arrive(self) -> None:
        hot = self.random.random() < 0.5
        tenant = "hot" if hot else f"tenant-{self.random.randrange(7)}"
        own = self.random.randint(50, 400)
        prompt = own + (HOT_PREFIX if hot else 0)
        self.seq += 1
        snapshot = self.lab.pool.snapshot()
        session = hash64(f"{tenant} {self.random.randrange(40)}")
        bound = self.bindings.get(session, "")
        query = Query(
            prompt_tokens=prompt,
            max_tokens=128,
            request_key=hash64(f"request {self.seq}"),
            session_key=session,
            bound=snapshot.worker_ids.index(bound) if bound else -1,
            matched_tokens=np.array([float(w.cached[tenant]) for w in self.workers.values()]),
            turn=self.seq,
        )
        choice = self.policy.choose(snapshot, query, why_not_for(snapshot, query))
        assert choice is not None
        worker_id = snapshot.worker_ids[choice.index]
        self.sticky += bool(bound)
        self.kept += worker_id == bound
        self.bindings[session] = worker_id
        worker = self.workers[worker_id]
        computed = max(prompt - worker.cached[tenant], 1)
        self.lab.pool.book(worker_id, self.seq, computed)
        worker.prefills.append([computed, self.random.randint(20, 128)])
        worker.cached[tenant] = HOT_PREFIX if hot else 0
        worker.acked = self.seq

    def run(self, seconds: float, rate: float) -> None:
        due = 0.0
        for tick in range(int(seconds / TICK_S)):
            while due < tick * TICK_S:
                self.arrive()
                due += self.random.expovariate(rate)
            self.lab.clock.now += TICK_S
            for worker_id, worker in self.workers.items():
                worker.step()
                self.lab.tell(
                    worker_id,
                    queued_prefill_tokens=sum(p[0] for p in worker.prefills),
                    running=len(worker.decodes),
                    waiting=len(worker.prefills),
                    decode_step_ms=20 * (1 + len(worker.decodes) / 64),
                    acked={"router": worker.acked},
                    computed_tokens=worker.work,
                )

    def imbalance(self) -> float:
        work = [worker.work for worker in self.workers.values()]
        return max(work) / (sum(work) / len(work)) - 1


def test_a_hot_tenant_with_sticky_sessions_leaves_the_fleet_balanced() -> None:
    simulation = Simulation("cost", seed=1)
    simulation.run(seconds=60, rate=100)
    assert simulation.imbalance() < 0.05
    assert simulation.kept / simulation.sticky > 0.85


def test_the_simulation_would_show_imbalance() -> None:
    simulation = Simulation("session_hash", seed=1)
    simulation.run(seconds=30, rate=100)
    assert simulation.imbalance() > 0.05


@pytest.mark.parametrize("policy", ["least_loaded", "round_robin", "weighted"])
def test_policies_without_affinity_are_balanced(policy: str) -> None:
    simulation = Simulation(policy, seed=1)
    simulation.run(seconds=30, rate=60)
    assert simulation.imbalance() < 0.05


def test_noisy_speeds_of_equal_workers_starve_no_worker() -> None:
    simulation = Simulation("cost", seed=4)
    noise = random.Random(5)
    tell = simulation.lab.tell

    def noisy(worker_id: str, **fields: object) -> None:
        step_ms = float(fields.get("decode_step_ms", 20.0))  # type: ignore[arg-type]
        tell(worker_id, **{**fields, "decode_step_ms": step_ms * noise.uniform(0.95, 1.05)})

    simulation.lab.tell = noisy  # type: ignore[method-assign]
    simulation.run(seconds=60, rate=100)
    assert simulation.imbalance() < 0.05
