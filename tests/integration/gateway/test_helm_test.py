"""The program of `helm test` against a gateway: each model is asked for what it does."""

from __future__ import annotations

import asyncio
import os
import sys

from ryzanstein.v1 import worker_pb2

from tests.integration.gateway.fleet import Worker
from tests.integration.gateway.gateways import running_stack
from tests.programs import CHART

PROGRAM = CHART / "files" / "helm_test.py"


async def helm_test(url: str, *models: str) -> tuple[int, str]:
    """Its exit status and what it wrote."""
    env = os.environ | {"BASE_URL": url, "MODELS": "\n".join(models)}
    pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.STDOUT}
    process = await asyncio.create_subprocess_exec(sys.executable, str(PROGRAM), env=env, **pipes)
    output, _ = await process.communicate()
    return process.returncode or 0, output.decode()


async def test_helm_test_calls_the_task_of_each_model() -> None:
    classes = worker_pb2.Classes(labels=["a", "b", "c", "d"])
    workers = [
        Worker("w0", model="chats", cached_tokens=16),
        Worker("w1", model="embeds", abilities=worker_pb2.ModelCard(only_embeds=True)),
        Worker("w2", model="classifies", abilities=worker_pb2.ModelCard(only_embeds=True, classes=classes)),
        Worker("w3", model="forgets"),
    ]
    async with running_stack(workers) as stack:
        status, output = await helm_test(stack.url, "chats", "embeds", "classifies")
        assert (status, output.splitlines()[:3]) == (
            0,
            [
                "chats: chat, stream and session are well",
                "embeds: embeddings or classes are well",
                "classifies: embeddings or classes are well",
            ],
        )
        status, output = await helm_test(stack.url, "chats", "forgets")
        assert status
        listed = (await stack.http.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == ["chats", "forgets", "classifies", "embeds"], "a chat's model first"
        assert "forgets: the second turn had no cached tokens" in output
