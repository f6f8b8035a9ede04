"""Preemption: which request frees its blocks when the KV cache is full. It keeps its tokens and is computed again."""

from __future__ import annotations

from collections.abc import Iterable

from services.worker.scheduling.fairness import TenantLedger
from services.worker.scheduling.request import Request

MAX_PREEMPTIONS = 2


def is_protected(request: Request) -> bool:
    """Whether the request was preempted often enough: its next admission gets all its blocks and is never preempted."""
    return request.n_preempted >= MAX_PREEMPTIONS


def choose_victim(running: Iterable[Request], ledger: TenantLedger) -> Request | None:
    """The youngest request of the most-served tenant in the least important priority, protected ones excepted."""
    return max(
        (request for request in running if not is_protected(request)),
        key=lambda request: (request.priority, ledger.served(request.tenant), request.arrival),
        default=None,
    )
