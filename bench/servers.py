"""Starts the servers of a comparison, and measures their start time and memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import time
import tomllib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx
import psutil

from services.common.ports import free_port

PEERS = Path(__file__).with_name("peers.toml")
LLAMA_DRAFTERS = ("none", "ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod")  # bench.llama_server's


@dataclass(frozen=True)
class Peer:
    """One entry of peers.toml."""

    name: str
    command: str
    ready: str
    form: str = "safetensors"  # checkpoint format
    weights: tuple[str, ...] = ("bf16",)  # number formats that it computes
    env: dict[str, str] = field(default_factory=dict)
    start_timeout_s: float = 300.0


def read_peers(path: Path = PEERS) -> dict[str, Peer]:
    """All known peers by name."""
    return {name: Peer(name, **entry) for name, entry in tomllib.loads(path.read_text()).items()}


@dataclass
class Server:
    """A started peer."""

    peer: Peer
    url: str
    process: asyncio.subprocess.Process
    start_s: float = 0.0

    def memory_mib(self) -> float:
        """Proportional set size of the whole process tree: shared pages count once."""
        total = 0
        for process in self._tree():
            with contextlib.suppress(psutil.Error):
                total += process.memory_full_info().pss
        return total / 2**20

    async def stop(self) -> None:
        """Send SIGINT, then SIGKILL to the remaining processes of the tree."""
        tree = self._tree()
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGINT)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(30):
                await self.process.wait()
        for process in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def _tree(self) -> list[psutil.Process]:
        try:
            root = psutil.Process(self.process.pid)
        except psutil.NoSuchProcess:
            return []
        return [root, *root.children(recursive=True)]


@dataclass(frozen=True)
class ModelTarget:
    """A model for a peer to serve. All but the model are Ryzanstein's options."""

    model: str
    ranks: int = 1
    quantization: str = "auto"
    kv_dtype: str = "auto"
    attention: str = "dense"


@asynccontextmanager
async def started(peer: Peer, home: str, target: ModelTarget, log: Path) -> AsyncIterator[Server]:
    """Run a peer while the block runs; raises RuntimeError or OSError if it does not start."""
    server = await start(peer, home, target, log)
    try:
        yield server
    finally:
        await server.stop()


async def start(peer: Peer, home: str, target: ModelTarget, log: Path) -> Server:
    """Start a peer and wait until it is ready; raises RuntimeError if it ends or is not ready in time."""
    port = free_port()
    cores = len(os.sched_getaffinity(0))
    words = {"home": home, "port": port, "threads": cores, **asdict(target)}
    command = [word.format(**words) for word in shlex.split(peer.command)]
    environment = {name: value.format(**words) for name, value in peer.env.items()}
    began = time.perf_counter()
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command, env={**os.environ, **environment}, stdout=output, stderr=asyncio.subprocess.STDOUT
        )
    server = Server(peer, f"http://127.0.0.1:{port}", process)
    async with httpx.AsyncClient(trust_env=False, timeout=2) as client:
        while time.perf_counter() - began < peer.start_timeout_s:
            if process.returncode is not None:
                raise RuntimeError(f"{peer.name} ended with status {process.returncode}; see {log}")
            with contextlib.suppress(httpx.HTTPError):
                if (await client.get(server.url + peer.ready)).status_code == httpx.codes.OK:
                    server.start_s = time.perf_counter() - began
                    return server
            await asyncio.sleep(0.05)
    await server.stop()
    raise RuntimeError(f"{peer.name} was not ready after {peer.start_timeout_s:.0f} s; see {log}")
