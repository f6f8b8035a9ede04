"""One run of a rank group, from the launcher's start to the last process reaped. A restart makes a new run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Coroutine
from typing import Any

from services.compute.ranks.config import RankGroupConfig
from services.compute.ranks.line import RankLine, RankState
from services.worker.engine.process_info import describe_exit, describe_status, reap_adopted
from services.worker.engine.stall import StallDetector, StallLimits, find_stopped
from services.worker.process.block_copies import BlockCopies
from services.worker.process.death_watch import DeathWatch
from services.worker.process.failure import FailureKind, RankFailure, RanksFailedError
from services.worker.process.launcher import Launcher
from services.worker.process.link import GroupLink
from services.worker.process.memory_kills import MemoryKills
from services.worker.process.orders import Orders
from services.worker.protocol.event_codec import RankError, RankStarted, decode_event, encode_stop
from services.worker.protocol.order_codec import Order, decode_answer
from services.worker.protocol.plan import StepPlan, StepResult
from services.worker.protocol.plan_codec import encode_plan
from services.worker.protocol.result_codec import decode_result
from services.worker.protocol.words import Kind

_LOOK_S = 0.1
_IDLE_LOOK_S = 1.0
_REAPING_S = 0.2
_KILLED_S = 10.0  # longest wait after SIGKILL, which takes effect much sooner
logger = logging.getLogger(__name__)


class RankGroupRun:
    """The processes, their shared memory and the plans in flight."""

    def __init__(
        self,
        config: RankGroupConfig,
        deliver: Callable[[StepResult], None],
        on_end: Callable[[], None],
        on_warming: Callable[[], None],
    ) -> None:
        """`on_warming`: called when all ranks have their weights, in a start or a wake that computes first steps."""
        self._config, self._deliver, self._on_end, self._on_warming = config, deliver, on_end, on_warming
        self._loop = asyncio.get_running_loop()
        self._link = GroupLink(config)
        self._orders = Orders(config.ranks, self._link.send)
        self.copies = BlockCopies(self._link.staging, self.order)
        self._launcher: Launcher | None = None
        self._n_warming = 0  # messages of ranks that have their weights
        self._started: dict[int, RankStarted] = {}
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self.lost: asyncio.Future[str] = self._loop.create_future()  # the reason known at the first sign of a failure
        self.failed: asyncio.Future[RankFailure] = self._loop.create_future()  # the cause, known later
        self._deaths = DeathWatch(self._on_death)
        self._memory_kills = MemoryKills()
        self._pidfds: dict[int, int] = {}  # rank -> pidfd, while the process lives
        self._all_gone = asyncio.Event()
        self._ending = False
        self._busy = asyncio.Event()  # plans or orders are in flight
        self._exit_watch: asyncio.Task[None] | None = None
        self._progress_watch: asyncio.Task[None] | None = None
        self._detectors: list[StallDetector] = []
        self.in_flight = 0

    @property
    def signs(self) -> int:
        """Signs of life of the rank that showed the fewest, since the start, while there was work."""
        return min((detector.signs for detector in self._detectors), default=0)

    @property
    def held(self) -> int:
        """Bytes that the ranks held after their start, or their last sleep or wake."""
        return sum(line.held for line in self._link.lines) if self._pidfds else 0

    @property
    def promised(self) -> int:
        """Bytes that the ranks have yet to take for their KV cache."""
        return sum(line.promised for line in self._link.lines) if self._pidfds else 0

    @property
    def _working(self) -> bool:
        return self.in_flight > 0 or len(self._orders) > 0

    async def start(self) -> tuple[RankStarted, ...]:
        """Launch and wait until every rank is warm. Raises RanksFailedError after ending all processes."""
        self._loop.add_reader(self._link.doorbell.read_fd, self._on_doorbell)
        self._launcher = await Launcher.spawn(self._link.settings)
        self._exit_watch = self._watching(self._watch_launcher(self._launcher), "rank-launcher")
        timeout = self._config.start_timeout_s
        done, _ = await asyncio.wait((self._ready, self.failed), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            late = sorted(set(range(self._config.ranks)) - set(self._started))
            rank = late[0] if len(late) == 1 else None
            self._fail(
                RankFailure(
                    rank,
                    FailureKind.LAUNCH,
                    f"ranks {late} not ready within {timeout:g} s (RYZANSTEIN_START_TIMEOUT_S)",
                )
            )
        if self.failed.done():
            await self.stop()
            raise RanksFailedError(self.failed.result())
        self._progress_watch = self._watching(self._watch_progress(), "rank-progress")
        return tuple(self._started[rank] for rank in range(self._config.ranks))

    def submit(self, plan: StepPlan) -> None:
        """Send a plan. Raises RanksFailedError, or ValueError beyond `max_in_flight`."""
        if self.failed.done():
            raise RanksFailedError(self.failed.result())
        if self.in_flight >= self._config.max_in_flight:
            raise ValueError(
                f"{self.in_flight} plans are in flight already, max_in_flight is {self._config.max_in_flight}"
            )
        self._link.send(encode_plan(plan))
        self.in_flight += 1
        self._busy.set()

    def order(self, order: Order) -> asyncio.Future[str]:
        """Send an order; see `Orders.send`."""
        self._busy.set()
        return self._orders.send(order)

    def give_up(self, reason: str) -> None:
        """End the ranks, which hang for `reason`."""
        self._fail(RankFailure(None, FailureKind.STALLED, reason))

    async def stop(self) -> None:
        """End every process and release the shared memory. Called once."""
        grace = self._config.stop_grace_s
        if not self._ending:
            self._ending = True
            self._orders.fail(RanksFailedError(RankFailure(None, FailureKind.EXITED, "the ranks are being stopped")))
            self._link.send(encode_stop())
            if self._pidfds and not await self._gone_within(grace) and self._launcher:
                self._launcher.terminate()
                await self._gone_within(grace)
        self._kill()
        await self._gone_within(_KILLED_S)
        if self._exit_watch is not None:
            await asyncio.wait((self._exit_watch,))
        reap_adopted([line.pid for line in self._link.lines if line.pid])
        await self._release()

    async def _release(self) -> None:
        if self._progress_watch is not None:
            self._progress_watch.cancel()
            await asyncio.wait((self._progress_watch,))
        self._loop.remove_reader(self._link.doorbell.read_fd)
        for rank in list(self._pidfds):
            self._forget(rank)
        await self._deaths.close()
        self._link.close()
        self._on_end()

    async def _gone_within(self, seconds: float) -> bool:
        if not self._pidfds:
            return True
        self._all_gone.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._all_gone.wait()
        return not self._pidfds

    def _on_doorbell(self) -> None:
        self._read_messages()
        if len(self._pidfds) < self._config.ranks and not self._ending:
            self._watch_new_ranks()

    def _read_messages(self) -> None:
        for rank, words in self._link.messages():
            if self._ending:
                continue  # results have no receiver any more, and only the first failure counts
            if words[0] == Kind.RESULT:
                self.in_flight -= 1
                self._deliver(decode_result(words))
            elif words[0] == Kind.ANSWER:
                self._orders.answered(rank, *decode_answer(words))
            elif words[0] == Kind.WARMING:
                self._n_warming += 1
                if self._n_warming % self._config.ranks == 0:  # each rank sends one in a start or a wake
                    self._on_warming()
            else:
                self._on_event(rank, decode_event(words))

    def _on_event(self, rank: int, event: RankStarted | RankError) -> None:
        if isinstance(event, RankStarted):
            self._started[rank] = event
            if len(self._started) == self._config.ranks and not self._ready.done():
                self._ready.set_result(None)
            return
        blamed = event.suspects[0] if event.suspects else rank
        self._fail(RankFailure(blamed, FailureKind.ERROR, event.error, traceback=event.traceback))

    def _watch_new_ranks(self) -> None:
        """Watch the ranks that have published their process ids since the last call."""
        for rank, line in enumerate(self._link.lines):
            if line.pid and rank not in self._pidfds:
                try:
                    pidfd = os.pidfd_open(line.pid)
                except ProcessLookupError:
                    self._fail(RankFailure(rank, FailureKind.EXITED, f"process {line.pid} is gone"))
                    return
                self._pidfds[rank] = pidfd
                self._loop.add_reader(pidfd, self._on_exit, rank)
                self._deaths.watch(rank, self._link.life_locks[rank])

    def _on_death(self, rank: int) -> None:
        """Handle the first sign of a rank's death; its exit status follows when it is dead."""
        if not self._ending:
            self._read_messages()  # the rank may have sent its own error, which says more
        if not self.lost.done():
            self.lost.set_result(f"rank {rank}: process {self._link.lines[rank].pid} is dying")
        if rank in self._pidfds:  # if only the main thread has ended, other threads would keep the process alive
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfds[rank], signal.SIGKILL)

    def _on_exit(self, rank: int) -> None:
        exited = describe_exit(self._link.lines[rank].pid)
        self._forget(rank)
        if self._launcher is None or not self._launcher.is_rank:  # `_watch_launcher` gets the status of a child
            self._exited(rank, *exited)

    def _exited(self, rank: int, text: str, number: int | None) -> None:
        if not self._ending:
            self._read_messages()  # the rank may have sent its own error, which says more
            why = self._memory_kills.explain() if number == signal.SIGKILL else ""
            self._fail(RankFailure(rank, FailureKind.EXITED, text + why, number))

    def _forget(self, rank: int) -> None:
        pidfd = self._pidfds.pop(rank)
        self._loop.remove_reader(pidfd)
        os.close(pidfd)
        if not self._pidfds:
            self._all_gone.set()

    def _fail(self, failure: RankFailure) -> None:
        """Kill the group and record its first failure; later failures follow from the first."""
        if self._ending:
            return
        self._ending = True
        logger.error("%s", failure, extra={"traceback": failure.traceback} if failure.traceback else None)
        self._kill()
        self._orders.fail(RanksFailedError(failure))
        if not self.lost.done():
            self.lost.set_result(str(failure))
        self.failed.set_result(failure)
        self._on_end()

    def _kill(self) -> None:
        """Send SIGKILL, which also ends stopped processes. The launcher gets _REAPING_S to reap its children and exit,
        unless some ranks have not published their process ids yet: they die with the launcher.
        """
        for pidfd in self._pidfds.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        if self._launcher is not None:
            known = all(line.pid for line in self._link.lines)
            self._loop.call_later(_REAPING_S if known else 0.0, self._launcher.kill)

    def _watching(self, watch: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run a watch. Its error fails the group, which would otherwise serve unwatched."""

        def note_end(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                self._fail(RankFailure(None, FailureKind.ERROR, f"the task {name} has failed: {error!r}"))

        task = asyncio.create_task(watch, name=name)
        task.add_done_callback(note_end)
        return task

    async def _watch_launcher(self, launcher: Launcher) -> None:
        status = await launcher.wait()
        if launcher.is_rank and (pid := self._link.lines[0].pid):
            self._exited(0, *describe_status(pid, status))
        why = self._memory_kills.explain()
        self._fail(
            RankFailure(
                None,
                FailureKind.LAUNCH,
                f"{launcher.name} ended with status {status}{why}; it printed:\n{launcher.output_tail}",
            )
        )

    async def _watch_progress(self) -> None:
        """While there is work, look for stalled ranks every _LOOK_S; otherwise for stopped ranks."""
        detectors = self._detectors = [self._detector(line) for line in self._link.lines]
        while True:
            if not self._working:
                self._busy.clear()
                if await self._fails_idle():
                    return
                for detector in detectors:
                    detector.reset()
            last = time.monotonic()
            await asyncio.sleep(_LOOK_S)
            elapsed = time.monotonic() - last
            for rank, detector in enumerate(detectors):
                if self._working and (reason := detector.look(elapsed)):
                    self._fail(RankFailure(rank, FailureKind.STALLED, reason))
                    return

    def _detector(self, line: RankLine) -> StallDetector:
        busy_s = self._config.busy_timeout_s
        limits, start_s = StallLimits(self._config.stall_timeout_s, busy_s), self._config.start_timeout_s
        # Files may come slowly.
        patient = {RankState.LOADING: StallLimits(busy_s, busy_s), RankState.MOVING: StallLimits(start_s, start_s)}

        def where() -> str:
            return f"at step {line.step} ({RankState(line.state).name.lower().replace('_', ' ')})"

        def limits_now() -> StallLimits:
            return patient.get(line.state, limits)

        return StallDetector([line.pid], lambda: line.beats, where, limits_now)

    async def _fails_idle(self) -> bool:
        """Wait for work; returns whether a rank was stopped meanwhile, before a request would find out."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_IDLE_LOOK_S):
                    await self._busy.wait()
                    return False
            for rank, line in enumerate(self._link.lines):
                if find_stopped([line.pid]):
                    reason = f"process {line.pid} is stopped by a signal, without work"
                    self._fail(RankFailure(rank, FailureKind.STALLED, reason))
                    return True
