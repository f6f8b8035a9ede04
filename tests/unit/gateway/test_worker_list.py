"""The choice of a worker without a router."""

from __future__ import annotations

from collections import Counter

from ryzanstein.v1 import routing_pb2, worker_pb2

from services.gateway.upstream.workers import WorkerList

_SESSIONS = [f"session-{number}" for number in range(4000)]


def _view(
    number: int,
    phase: worker_pb2.Phase = worker_pb2.PHASE_SERVING,
    breaker: routing_pb2.WorkerView.Breaker = routing_pb2.WorkerView.BREAKER_CLOSED,
) -> routing_pb2.WorkerView:
    state = worker_pb2.WorkerState(phase=phase, incarnation=f"process-{number}")
    name, address = f"ryzanstein-worker-{number}", f"10.0.0.{number}:50051"
    return routing_pb2.WorkerView(worker_id=name, address=address, model="m", state=state, breaker=breaker)


def _picks(listed: WorkerList, *excluded: str) -> dict[str, str]:
    refs = {session: listed.pick("m", session, excluded) for session in _SESSIONS}
    return {session: ref.worker_id for session, ref in refs.items() if ref}


def test_gateways_pick_the_same_worker_and_spread_sessions_evenly() -> None:
    views = [_view(number) for number in range(20)]
    picks = _picks(WorkerList(tuple(views)))
    assert picks == _picks(WorkerList(tuple(reversed(views))))
    numbers = Counter(picks.values())
    assert len(numbers) == len(views)
    assert max(numbers.values()) < 1.4 * len(_SESSIONS) / len(views)


def test_sessions_of_a_lost_worker_spread_and_no_other_session_moves() -> None:
    views = [_view(number) for number in range(20)]
    before = _picks(WorkerList(tuple(views)))
    lost = views[7].worker_id
    after = _picks(WorkerList(tuple(views)), lost)
    assert after == _picks(WorkerList(tuple(view for view in views if view.worker_id != lost)))
    moved = {session: worker for session, worker in after.items() if worker != before[session]}
    assert {before[session] for session in moved} == {lost}
    assert len(set(moved.values())) == len(views) - 1


def test_only_serving_workers_of_the_model_are_picked() -> None:
    views = (
        _view(0),
        _view(1, phase=worker_pb2.PHASE_DRAINING),
        _view(2, breaker=routing_pb2.WorkerView.BREAKER_OPEN),
    )
    assert set(_picks(WorkerList(views)).values()) == {"ryzanstein-worker-0"}
    assert WorkerList(views).pick("another", "session", ()) is None
    assert WorkerList(views).pick("m", "session", ("ryzanstein-worker-0",)) is None
    assert WorkerList(views).serves("m", ())
    assert not WorkerList(views).serves("m", ("ryzanstein-worker-0",))
