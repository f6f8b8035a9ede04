"""The last known list of all workers, and the choice of a worker without a router."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import NamedTuple

from ryzanstein.v1 import routing_pb2, worker_pb2

from services.common.phases import phase_name
from services.gateway.upstream.connection import WorkerRef

# Phases by how soon a worker serves.
_NEAREST = (
    *(worker_pb2.PHASE_SERVING, worker_pb2.PHASE_WAKING, worker_pb2.PHASE_SLEEPING),
    *(worker_pb2.PHASE_RECOVERING, worker_pb2.PHASE_LOADING, worker_pb2.PHASE_DRAINING),
)
_MASK = 2**64 - 1
_MULTIPLIER = 0x9E3779B97F4A7C15  # Fibonacci hashing (Knuth 1973): 2**64 over the golden ratio


class _Eligible(NamedTuple):
    """A worker that can take requests, and the hash of its id."""

    ref: WorkerRef
    hash: int


@dataclass(frozen=True)
class WorkerList:
    """The workers that a router listed, and the models that it expects. A list is read for as long as it is current."""

    views: tuple[routing_pb2.WorkerView, ...] = ()
    expected: frozenset[str] | None = None  # models that are known without a worker; None: no router has read them yet
    version: str = ""

    @cached_property
    def refs(self) -> frozenset[WorkerRef]:
        """The refs of all worker processes."""
        return frozenset(ref_of(view) for view in self.views)

    @cached_property
    def awaited(self) -> frozenset[str]:
        """The models whose requests wait: the expected ones, and those of workers, which may still be loading."""
        return (self.expected or frozenset()) | self.models

    def has(self, ref: WorkerRef) -> bool:
        """Whether a worker process holds its lease. A router that has just started may not know which process it is."""
        return any(
            view.worker_id == ref.worker_id and view.state.incarnation in ("", ref.incarnation) for view in self.views
        )

    @cached_property
    def models(self) -> frozenset[str]:
        """The models that a worker serves or will serve."""
        return frozenset(view.model for view in self.views)

    def phase(self, model: str) -> str:
        """The phase of the model's worker that is nearest to serving; "" without a worker."""
        phases = {view.state.phase for view in self.views if view.model == model}
        return next((phase_name(phase) for phase in _NEAREST if phase in phases), "")

    @property
    def anybody_serves(self) -> bool:
        """Whether a worker is serving."""
        return any(view.state.phase == worker_pb2.PHASE_SERVING for view in self.views)

    def pick(self, model: str, key: str, excluded: Collection[str]) -> WorkerRef | None:
        """Pick a worker by rendezvous hashing (Thaler and Ravishankar 1998): the same one on all gateways."""
        place = int.from_bytes(weight(key, ""))
        eligible = self._eligible(model, excluded)
        best = max(eligible, key=lambda each: ((place ^ each.hash) * _MULTIPLIER) & _MASK, default=None)
        return None if best is None else best.ref

    def serves(self, model: str, excluded: Collection[str]) -> bool:
        """Whether a worker that is not excluded can take requests for the model."""
        return any(True for _ in self._eligible(model, excluded))

    def _eligible(self, model: str, excluded: Collection[str]) -> Iterator[_Eligible]:
        return (each for each in self._serving.get(model, ()) if each.ref.worker_id not in excluded)

    @cached_property
    def _serving(self) -> Mapping[str, Sequence[_Eligible]]:
        """The workers that can take requests, by model. Hashed once: without routers every request picks among all."""
        serving = defaultdict[str, list[_Eligible]](list)
        for view in self.views:
            if view.state.phase == worker_pb2.PHASE_SERVING and view.breaker != routing_pb2.WorkerView.BREAKER_OPEN:
                serving[view.model].append(_Eligible(ref_of(view), int.from_bytes(weight("", view.worker_id))))
        return serving


def ref_of(view: routing_pb2.WorkerView) -> WorkerRef:
    """The ref of a listed worker process."""
    return WorkerRef(view.worker_id, view.state.incarnation, view.address)


def weight(key: str, name: str) -> bytes:
    """The weight of a name for a key in rendezvous hashing: the same on all gateways."""
    return blake2b(f"{key}\0{name}".encode(), digest_size=8).digest()
