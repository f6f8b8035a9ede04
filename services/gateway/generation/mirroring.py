"""Mirrored requests: a second model answers a part of a route's requests. Its answers are measured and thrown away."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from services.common.tasks import end_tasks, log_failure
from services.gateway.api.ignored import Ignored
from services.gateway.errors import NO_WORKERS, ApiError, no_worker
from services.gateway.generation.attempt import Cause
from services.gateway.generation.output import Generation
from services.gateway.generation.prepared import Prepared
from services.gateway.generation.recording import SequenceRecord
from services.gateway.generation.request import LAST_PRIORITY, Caller
from services.gateway.names.canary import Tally
from services.gateway.names.route import Mirror
from services.gateway.telemetry import GatewayMetrics
from services.gateway.text.codec import ServedModel
from services.gateway.upstream.catalog import Catalog
from services.gateway.upstream.patience import StartPatience

log = logging.getLogger(__name__)

PrepareOn = Callable[[ServedModel], Awaitable[Prepared]]
Prepare = Callable[[ServedModel, Caller], Awaitable[Prepared]]
_WAIT_S = 0.5  # longest wait for a worker
# Codes of errors that say nothing of the model.
_DROPPED = {NO_WORKERS, "overloaded", *map(str, (Cause.CONNECT, Cause.DRAIN, Cause.LOADING, Cause.OVERLOAD))}


@dataclass(frozen=True, slots=True)
class Reflection:
    """A sequence as the route's target and the mirror's model have answered it."""

    route: str
    model: str  # name of the mirror's model
    target: SequenceRecord
    mirror: SequenceRecord
    greedy: bool

    @property
    def differs_at(self) -> int | None:
        """The position of the first differing token of greedy answers."""
        return self.target.differs_at(self.mirror) if self.greedy and not self.mirror.error else None

    @property
    def result(self) -> str:
        """Its word in the metrics."""
        if self.mirror.error:
            return "dropped" if self.mirror.error in _DROPPED else "failed"
        if not self.greedy:
            return "answered"
        return "same" if self.differs_at is None else "different"

    def tally(self) -> Tally:
        """The comparison as sums."""
        mirror, target, differs = self.mirror, self.target, self.differs_at
        greedy = self.greedy and not (mirror.error or target.error)
        timed = mirror.pace_s > 0 and target.pace_s > 0
        return Tally(
            sequences=1,
            failed=bool(mirror.error) and not mirror.refused_by_grammar,
            target_failed=bool(target.error) and not target.refused_by_grammar,
            refused=mirror.refused_by_grammar,
            target_refused=target.refused_by_grammar,
            greedy=greedy,
            agreement=0 if not greedy else 1 if differs is None else differs / max(1, len(target.ids)),
            timed=timed,
            **({"first_s": mirror.first_s, "pace_s": mirror.pace_s} if timed else {}),
            **({"target_first_s": target.first_s, "target_pace_s": target.pace_s} if timed else {}),
        )


class Mirrors:
    """Runs mirrored requests, a limited number at a time for each route; no client waits for them."""

    def __init__(self, catalog: Catalog, metrics: GatewayMetrics, compared: Callable[[str, str, Tally], None]) -> None:
        """`compared` gets the route, the mirror's model and the comparison of each sequence that both have ended."""
        self._catalog = catalog
        self._metrics = metrics
        self._compared = compared
        self._running: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, route: str, mirror: Mirror, prepared: Prepared, caller: Caller, prepare: Prepare) -> None:
        """Mirror a request that has been prepared for its target and has not started yet."""
        if self._running[route] >= mirror.max_running:
            self._count(route, mirror.model, "dropped")
            return
        own = replace(
            caller,
            priority=LAST_PRIORITY,
            session="",  # the session's worker stays the target's
            keep_alive_s=None,
            ignored=Ignored(),
            handed_on=frozenset(("no_worker", "overloaded")),
            wait_s=_WAIT_S,
            mirrored=True,
            patience=StartPatience(),
        )
        targets = [generation.record() for generation in prepared.generations]
        self._running[route] += 1
        task = asyncio.create_task(self._run(route, mirror.model, targets, lambda model: prepare(model, own)))
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def aclose(self) -> None:
        """Stop all mirrored requests."""
        await end_tasks(list(self._tasks))

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        log_failure(log, task)

    async def _run(
        self,
        route: str,
        name: str,
        targets: Sequence[SequenceRecord],
        prepare: Callable[[ServedModel], Awaitable[Prepared]],
    ) -> None:
        try:
            mirrored = await self._answers(name, prepare)
        except ApiError as error:
            self._count(route, name, "dropped" if error.code in _DROPPED else "failed")
            return
        finally:
            self._running[route] -= 1
        for target, (mirror, greedy) in zip(targets, mirrored, strict=True):
            await target.ended.wait()
            reflection = Reflection(route, name, target, mirror, greedy)
            self._count(route, name, reflection.result)
            if reflection.result != "dropped" and (target.finished or target.error):
                self._compared(route, name, reflection.tally())

    async def _answers(self, name: str, prepare: PrepareOn) -> list[tuple[SequenceRecord, bool]]:
        """The mirror's sequences, and whether they are greedy; raises :class:`ApiError` when none begins."""
        model = next((model for model in self._catalog.available() if model.name == name), None)
        if model is None:
            raise no_worker(name)
        prepared = await prepare(model)
        try:
            recordings = await asyncio.gather(*map(_recorded, prepared.generations))
        finally:
            prepared.close()
        greedy = (generation.request.options.temperature == 0 for generation in prepared.generations)
        return list(zip(recordings, greedy, strict=True))

    def _count(self, route: str, model: str, result: str) -> None:
        self._metrics.mirrored.labels(route, model, result).inc()


async def _recorded(generation: Generation) -> SequenceRecord:
    """A sequence from its begin to its end."""
    recording, finished = generation.record(), False
    try:
        while not finished:
            finished = (await generation.next()).finish is not None
    except ApiError as error:
        recording.fail(error)
    return recording
