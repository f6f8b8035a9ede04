"""A machine that follows the leader of its worker: it runs ranks, which the leader commands, and takes no requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence

from services.common.lifecycle import read_settings
from services.common.logs import configure_logging
from services.common.tasks import end_tasks
from services.worker.settings import WorkerSettings
from services.worker.vllm.arguments import engine_arguments
from services.worker.vllm.nodes import RENDEZVOUS_PORT, Node, attend
from services.worker.vllm.orphan_reaper import OrphanReaper

_PAUSE_S = 1.0  # between attempts to reach the leader
COMMAND = (sys.executable, "-m", "services.worker.vllm.follower")

log = logging.getLogger(__name__)


async def follow(
    node: Node, settings: WorkerSettings, depends_on: Callable[[Callable[[], str]], None], stop: asyncio.Event
) -> None:
    """Run ranks for the leader, again and again, until `stop` is set.

    `depends_on` gets a function that returns why the machine is not ready; empty while ranks run.
    """
    follower = Follower(node, COMMAND, {"RYZANSTEIN_MODEL": settings.model})
    depends_on(lambda: follower.state)
    tasks = [asyncio.create_task(follower.run(), name="follower"), asyncio.create_task(stop.wait(), name="stop")]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end_tasks(tasks)


class Follower:
    """Runs a process with the ranks of this machine for as long as the leader's connection lasts."""

    def __init__(
        self, node: Node, command: Sequence[str], environment: Mapping[str, str], port: int = RENDEZVOUS_PORT
    ) -> None:
        self.state = "starting"  # why this machine is not ready; empty while its ranks run
        self._node, self._command, self._environment, self._port = node, command, environment, port

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            self.state = f"waiting for the leader {self._node.leader}"
            try:
                reader, writer = await attend(self._node, self._port)
            except OSError as error:
                log.info("the leader %s is not there: %s", self._node.leader, error)
                await asyncio.sleep(_PAUSE_S)
                continue
            self.state = ""
            try:
                await self._run_ranks(reader)
            finally:
                writer.close()
            await asyncio.sleep(_PAUSE_S)

    async def _run_ranks(self, leader: asyncio.StreamReader) -> None:
        """Run the ranks until they end, or the leader's connection does."""
        reaper = OrphanReaper()
        process = await asyncio.create_subprocess_exec(
            *self._command, env={**os.environ, **self._environment}, start_new_session=True
        )
        reaper.watch([-process.pid])
        log.info("the ranks of node %d are process %d", self._node.rank, process.pid)
        tasks = [asyncio.create_task(process.wait()), asyncio.create_task(_until_end(leader))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if process.returncode is None:
                log.warning("the leader has ended the connection: its ranks here also end")
            else:
                log.error("the ranks have ended with status %d", process.returncode)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await end_tasks(tasks)
            await process.wait()
            reaper.close()


async def _until_end(leader: asyncio.StreamReader) -> None:
    with contextlib.suppress(OSError):
        await leader.read()


def main() -> None:
    """The process with the ranks."""
    settings = read_settings(WorkerSettings)
    configure_logging("worker", settings.log_level)
    from services.worker.vllm.async_llm import run_follower  # vLLM takes seconds to import

    run_follower(engine_arguments(settings, settings.model), settings.kv_tokens)
    sys.exit(1)  # a rank has ended


if __name__ == "__main__":
    main()
