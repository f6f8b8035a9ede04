"""An installation of a fine-tuner: Redis, a Kubernetes API server, a folder, and the store of its jobs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.fine_tuning.records import Order
from services.common.fine_tuning.store import Job, TuningStore
from services.common.keys import RedisKeys
from services.finetuner.main import serve
from services.finetuner.settings import FinetunerSettings
from tests.integration.finetuner.api_server import OWNER, FaultyApi
from tests.integration.gateway.redis_server import RedisServer
from tests.kube_api import NAMESPACE
from tests.redis_users import url_of

LABELS = {f"app.kubernetes.io/{name}": name for name in ("name", "instance", "component")}
TEMPLATE = {
    "metadata": {
        "name": "training", "namespace": NAMESPACE, "labels": {**LABELS, "helm.sh/chart": "ryzanstein-1"},
        "ownerReferences": [{"apiVersion": "apps/v1", "kind": "Deployment", "name": OWNER, "uid": ""}],
    },
    "spec": {"template": {"spec": {"containers": [{"name": "training"}]}}},
}  # fmt: skip
ORDER = Order(
    id="ftjob-1", tenant="", model="tiny", training_file="file-a", validation_file=None, suffix=None, seed=7,
    n_epochs=2, batch_size=4, learning_rate_multiplier=1.0, lora_rank=4, quantization="none", metadata=None,
    credential="", created_at=0,
)  # fmt: skip
PATIENCE_S = 60.0


@dataclass
class Site:
    """A Redis and a Kubernetes API around a fine-tuner."""

    redis: RedisServer
    api: FaultyApi
    folder: Path
    store: TuningStore

    def settings(self, **overrides: Any) -> FinetunerSettings:
        values = {
            "redis_url": url_of("finetuner", self.redis.socket),
            "finetuner_models": {"tiny": "/base"},
            "finetuner_folder": str(self.folder),
            "finetuner_job_template": str(self.folder / "job.json"),
        }
        return FinetunerSettings(**(values | overrides))

    @asynccontextmanager
    async def fine_tuner(self, lease_s: float = 1.0, **overrides: Any) -> AsyncIterator[None]:
        stop = asyncio.Event()
        serving = asyncio.create_task(serve(self.settings(**overrides), stop, lease_s))
        try:
            yield
        finally:
            stop.set()
            await serving

    async def queue(self, content: bytes = b"{}\n") -> None:
        """Have the job wait for a fine-tuner, as a gateway does that has checked its file."""
        keys = RedisKeys("default")
        if content:
            self.redis.client.rpush(keys.file_pieces("", ORDER.training_file), content)
        await self.store.create(ORDER)
        claim = await self.store.claim("gateway", 10.0, ["check"])
        assert claim is not None
        await self.store.report(claim, 0, fields={"status": "queued", "stage": "train"})

    async def job(self) -> Job:
        actual = await self.store.get("", ORDER.id)
        assert actual is not None
        return actual

    async def until_job(self, condition: Callable[[Job], object]) -> Job:
        async with asyncio.timeout(PATIENCE_S):
            while not condition(job := await self.job()):  # noqa: ASYNC110  # other tasks do it
                await asyncio.sleep(0.01)
        return job

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():  # noqa: ASYNC110  # other threads do it
                await asyncio.sleep(0.01)

    async def until_made(self, count: int) -> None:
        """Wait until so many Jobs were made, the last of which is followed."""
        words = self.folder / "jobs" / ORDER.id / "words" / f"jobs-{count}.jsonl"
        await self.until(words.exists)

    async def until_looked(self) -> None:
        """Wait until the fine-tuner has asked for the Job several times."""
        enough = self.api.looks + 4
        await self.until(lambda: self.api.looks >= enough)

    async def until_given_back(self) -> None:
        """Wait until no fine-tuner has the job."""
        await self.until(lambda: not self.redis.client.hlen(RedisKeys("default").tuning_jobs.owners))

    async def until_said(self, message: str) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not any(message in expected for expected in await self.messages()):  # noqa: ASYNC110  # as above
                await asyncio.sleep(0.01)

    async def messages(self) -> list[str]:
        return [event.message for event in await self.store.events("", ORDER.id)]

    def say(self, *words: dict[str, Any]) -> None:
        """Speak as a training does that begins: the one before may have been killed within a line."""
        self.write("\n" + "".join(json.dumps(word) + "\n" for word in words))

    def write(self, text: str) -> None:
        """Write to the file that the training's command line names."""
        [container] = self.api.job()["spec"]["template"]["spec"]["containers"]
        with Path(container["args"][-1]).open("a") as file:
            file.write(text)
