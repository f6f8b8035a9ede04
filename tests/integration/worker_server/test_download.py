"""A worker whose model is still coming from a hub: alive, not ready, and it says how far it is."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from contextlib import aclosing
from pathlib import Path

import httpx
import psutil
import pytest

from services.common.keys import RedisKeys
from services.common.ports import free_port
from services.common.redis_client import RedisAccess, open_redis
from services.compute.model.loading.hub import Download
from services.compute.model.spec import ModelError
from services.worker.process.downloader import download
from tests.integration.cli.hub import Hub, running
from tests.integration.router.processes import until
from tests.integration.worker_server.processes import server_process
from tests.models import BUNDLED_MODEL

NEEDED = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
GATE_S = 120.0
ENDS_S = 60.0  # the gate stays shut for longer
TOLD = r"downloading ([\d,]+) of ([\d,]+) bytes of org/tiny\n"


async def test_a_download_is_told_does_not_look_dead_and_ends_with_its_worker(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {name: (BUNDLED_MODEL / name).read_bytes() for name in NEEDED}
    size = sum(map(len, files.values()))
    port = free_port()
    with running(Hub(files, behind_gate="model.safetensors")) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        served = {"MODEL": hub.repository, "METRICS_PORT": str(port)}
        as_router = RedisAccess(redis_url.replace("worker:", "router:"))
        async with (
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=5) as client,
            aclosing(open_redis(as_router, 5.0)) as routers_redis,
        ):

            async def told() -> httpx.Response | None:
                try:
                    return await client.get("/readyz")
                except httpx.TransportError:
                    return None

            async def half() -> bool:
                answer = await told()
                actual = re.match(TOLD, answer.text) if answer is not None else None
                if not actual:
                    return False
                there, total = (int(number.replace(",", "")) for number in actual.groups())
                assert total == size
                return 0 < there < total

            async def all_but_the_weights() -> bool:
                come = list((tmp_path / "hub").rglob("snapshots/*/*"))
                return len(come) == len(NEEDED) - 1 and await half()

            async def reported() -> bool:
                text = await routers_redis.get(RedisKeys("default").download("tiny"))
                progress = json.loads(text) if text else {"done": 0}
                return 0 < progress["done"] < progress["of"] == size

            async def ready() -> bool:
                answer = await told()
                return answer is not None and answer.status_code == 200

            with server_process(tmp_path, redis_url, **served) as worker:
                await until(all_but_the_weights, GATE_S)
                assert (await told()).status_code == 503  # type: ignore[union-attr]
                assert (await client.get("/livez")).status_code == 200
                assert "ryzanstein_build_info" in (await client.get("/metrics")).text
                assert unfinished(tmp_path)
                worker.process.terminate()
                assert worker.process.wait(ENDS_S) == 0
                assert not hub.open_gate.is_set()
                assert not unfinished(tmp_path)
            with server_process(tmp_path, redis_url, **served) as worker:
                await until(half, GATE_S)
                await until(reported, GATE_S)
                hub.open_gate.set()
                await until(ready, GATE_S)
                assert worker.process.poll() is None
        assert hub.sent["config.json"] == 1, "what had come was fetched again"


async def test_a_download_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that the hub lacks, and a process that the kernel kills."""
    begun: list[Download] = []
    files = {name: (BUNDLED_MODEL / name).read_bytes() for name in NEEDED}
    with running(Hub(files, behind_gate="model.safetensors")) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        with pytest.raises(ModelError, match="org/tiny@main: :Q8_0 chooses among GGUF files, and there is none"):
            await download("org/tiny:Q8_0", "", begun.append)
        assert not begun
        downloading = asyncio.create_task(download("org/tiny", "", begun.append))
        assert await asyncio.to_thread(hub.waiting.wait, GATE_S)
        (child,) = (one for one in psutil.Process().children() if "services.worker.process.downloader" in one.cmdline())
        os.kill(child.pid, signal.SIGKILL)
        with pytest.raises(ModelError, match="org/tiny: the download ended with status -9"):
            await downloading
    assert [one.model for one in begun] == ["org/tiny"]


def unfinished(folder: Path) -> list[Path]:
    """Files that the hub's library has not got all of."""
    return list((folder / "hub").rglob("*.incomplete"))
