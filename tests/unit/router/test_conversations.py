"""Simulated conversations in steady state: they stay where their history is cached, and the fleet stays even."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest

from services.router.policies import make_policy
from services.router.policies.registry import PolicyName
from services.router.snapshot import Query, hash64, why_not_for
from tests.unit.router.fleets import Lab

TICK_S = 0.01  # simulation's tick, a decode step, and the pace of states
PREFILL_PER_TICK = 50
SYSTEM, QUESTION, ANSWER, LONG_ANSWER, QUESTIONS = 250, 40, 32, 120, 6  # tokens; questions of a conversation


@dataclass(eq=False)
class Client:
    """Holds one conversation after another."""

    session: str = ""
    tenant: str = ""
    questions: int = QUESTIONS
    prompt: int = 0
    waits: bool = False


@dataclass
class SimulatedWorker:
    prefills: list[tuple[list[int], Client]] = field(default_factory=list)  # [tokens left]
    decodes: list[tuple[list[int], Client]] = field(default_factory=list)  # [tokens left]
    cached: dict[str, int] = field(default_factory=dict)  # tokens by session, or by tenant: its system prompt
    work: int = 0
    acked: int = 0


class ConversationSimulation:
    """Clients in a closed loop; one tenant of eight starts half of the conversations."""

    def __init__(
        self,
        seed: int,
        n_workers: int,
        n_clients: int,
        blind: float = 0.0,
        answer: int = ANSWER,
        policy: PolicyName = "cost",
    ) -> None:
        """`blind`: the share of requests whose look-up times out; `answer`: tokens of each answer."""
        self.blind, self.answer = blind, answer
        self.random, self.lab, self.policy = random.Random(seed), Lab(), make_policy(policy)
        self.workers = {f"worker-{i}": SimulatedWorker() for i in range(n_workers)}
        self.clients = [Client() for _ in range(n_clients)]
        self.bindings: dict[str, str] = {}
        self.seq = self.stayed = self.later = 0
        for worker_id in self.workers:
            self.lab.join(worker_id)

    def ask(self, client: Client) -> None:
        if client.questions == QUESTIONS:
            tenant = "hot" if self.random.random() < 0.5 else f"tenant {self.random.randrange(7)}"
            client.session, client.tenant, client.questions, client.prompt = f"session {self.seq}", tenant, 0, SYSTEM
        client.questions, client.prompt, client.waits, self.seq = (
            client.questions + 1,
            client.prompt + QUESTION,
            True,
            self.seq + 1,
        )
        snapshot, bound = self.lab.pool.snapshot(), self.bindings.get(client.session, "")
        cached = [max(w.cached.get(client.session, 0), w.cached.get(client.tenant, 0)) for w in self.workers.values()]
        cached = [min(tokens, client.prompt - 1) for tokens in cached]
        query = Query(
            prompt_tokens=client.prompt,
            max_tokens=self.answer,
            request_key=hash64(f"request {self.seq}"),
            session_key=hash64(client.session),
            bound=snapshot.worker_ids.index(bound) if bound else -1,
            matched_tokens=None if self.random.random() < self.blind else np.array([n // 16 * 16.0 for n in cached]),
            turn=self.seq,
        )
        choice = self.policy.choose(snapshot, query, why_not_for(snapshot, query))
        assert choice is not None
        worker_id = self.bindings[client.session] = snapshot.worker_ids[choice.index]
        self.later, self.stayed = self.later + bool(bound), self.stayed + (worker_id == bound)
        computed = client.prompt - cached[choice.index] // 16 * 16
        self.lab.pool.book(worker_id, self.seq, client.prompt - int(choice.chosen.matched_tokens))
        self.workers[worker_id].prefills.append(([computed], client))
        self.workers[worker_id].acked = self.seq

    def step(self, worker: SimulatedWorker) -> None:
        budget = PREFILL_PER_TICK
        while worker.prefills and budget:
            left, client = worker.prefills[0]
            done = min(budget, left[0])
            left[0], budget, worker.work = left[0] - done, budget - done, worker.work + done
            if not left[0]:
                worker.prefills.pop(0)
                worker.decodes.append(([self.answer], client))
                worker.cached[client.tenant] = SYSTEM
        for left, client in worker.decodes:
            left[0], worker.work = left[0] - 1, worker.work + 1
            if not left[0]:
                client.prompt, client.waits = client.prompt + self.answer, False
                worker.cached[client.session] = client.prompt - 1
        worker.decodes = [(left, client) for left, client in worker.decodes if left[0]]

    def run(self, seconds: float) -> None:
        for _ in range(int(seconds / TICK_S)):
            self.lab.clock.now += TICK_S
            for client in self.clients:
                if not client.waits:
                    self.ask(client)
            for worker_id, worker in self.workers.items():
                self.step(worker)
                self.lab.tell(
                    worker_id,
                    queued_prefill_tokens=sum(left[0] for left, _ in worker.prefills),
                    running=len(worker.decodes),
                    waiting=len(worker.prefills),
                    prefill_tokens_per_s=PREFILL_PER_TICK / TICK_S,
                    decode_step_ms=1000 * TICK_S * self.random.uniform(0.95, 1.05),
                    acked={"router": worker.acked},
                    computed_tokens=worker.work,
                )

    def measure(self, seconds: float) -> tuple[float, float]:
        """The share of later turns that stayed, and how far the busiest worker is above the mean."""
        before = {worker_id: worker.work for worker_id, worker in self.workers.items()}
        self.stayed = self.later = 0
        self.run(seconds)
        work = [worker.work - before[worker_id] for worker_id, worker in self.workers.items()]
        return self.stayed / self.later, max(work) / (sum(work) / len(work)) - 1


class OneWorkerWasLeft(ConversationSimulation):
    """Every client asks the same short question again and again; all sessions are bound to one worker at first."""

    def __init__(self, seed: int, n_workers: int, n_clients: int) -> None:
        super().__init__(seed, n_workers, n_clients, answer=LONG_ANSWER)
        for i, client in enumerate(self.clients):
            client.session, client.tenant = f"session {i}", f"tenant {i}"
            self.bindings[client.session] = "worker-0"

    def ask(self, client: Client) -> None:
        client.questions = client.prompt = 0
        super().ask(client)


@pytest.mark.parametrize(
    ("seed", "n_workers", "n_clients", "blind"),
    [(1, 2, 16, 0.0), (2, 3, 24, 0.0), (3, 3, 24, 0.1)],  # the last one was uneven when bookings were counted
)
def test_conversations_stay_and_the_fleet_is_even(seed: int, n_workers: int, n_clients: int, blind: float) -> None:
    """Also when look-ups fail now and then."""
    simulation = ConversationSimulation(seed, n_workers, n_clients, blind)
    simulation.run(20)
    stayed, imbalance = simulation.measure(60)
    assert stayed > 0.95
    assert imbalance < 0.05


@pytest.mark.parametrize(
    ("policy", "even"), [("least_loaded", True), ("round_robin", True), ("weighted", True), ("session_hash", False)]
)
def test_policies_without_affinity_are_even_and_hashed_sessions_are_not(policy: PolicyName, even: bool) -> None:
    simulation = ConversationSimulation(1, 3, 24, policy=policy)
    simulation.run(20)
    _, imbalance = simulation.measure(30)
    assert (imbalance < 0.05) == even


@pytest.mark.parametrize(("n_workers", "seed"), [(2, 1), (8, 3)])
def test_sessions_of_one_worker_spread_over_all_workers_without_oscillation(n_workers: int, seed: int) -> None:
    simulation = OneWorkerWasLeft(seed, n_workers, n_clients=64)
    simulation.run(5)
    stayed, _ = simulation.measure(20)
    on_each = Counter(simulation.bindings.values())
    assert stayed > 0.95
    assert max(on_each.values()) < 1.5 * 64 / n_workers


@pytest.mark.parametrize("sessions", [True, False])
@pytest.mark.parametrize("probes_ms", [(1.5, 5.5, 1.6), (2.0, 2.0, 2.0)])
def test_requests_that_all_come_at_once_are_spread_evenly(probes_ms: tuple[float, ...], sessions: bool) -> None:
    """No worker reports a state between the decisions."""
    lab, policy = Lab(), make_policy("cost")
    for i, probe_ms in enumerate(probes_ms):
        lab.join(f"w{i}", decode_step_ms=probe_ms, prefill_tokens_per_s=26_000 / probe_ms)
    on_each: Counter[str] = Counter()
    for i in range(64):
        snapshot = lab.pool.snapshot()
        query = Query(
            prompt_tokens=128,
            max_tokens=400,
            request_key=hash64(f"request {i}"),
            session_key=hash64(f"session {i}") if sessions else 0,
            matched_tokens=np.zeros(3),
        )
        choice = policy.choose(snapshot, query, why_not_for(snapshot, query))
        assert choice is not None
        worker_id = snapshot.worker_ids[choice.index]
        lab.pool.book(worker_id, i + 1, tokens=128)
        on_each[worker_id] += 1
    assert max(on_each.values()) - min(on_each.values()) <= 2


def test_a_worker_that_joins_takes_its_share_without_a_stampede() -> None:
    simulation = ConversationSimulation(3, 3, 24)
    simulation.run(15)
    simulation.workers["joining"] = SimulatedWorker()
    simulation.lab.join("joining", decode_step_ms=0)  # not measured yet
    stayed, _ = simulation.measure(5)
    assert simulation.workers["joining"].work
    assert stayed > 0.8
    simulation.run(30)
    stayed, imbalance = simulation.measure(30)
    assert stayed > 0.95
    assert imbalance < 0.10
