"""Schemathesis makes requests of our own OpenAPI document: none is answered 5xx, and every answer is as documented."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from services.common.fine_tuning.records import Presence
from services.common.tasks import end_tasks
from tests.integration.gateway.fleet import Worker
from tests.integration.gateway.gateways import running_stack
from tests.integration.gateway.redis_server import RedisServer, running_redis
from tests.integration.gateway.test_fine_tuning import finetuner

# The document at /openapi.json of a gateway: a test keeps the two equal.
DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "reference" / "openapi.json"
EXAMPLES = 2  # per operation, in addition to those that cover each keyword of its schema


# As a command of its own: with Schemathesis' plugin every process of pytest makes all requests when it collects tests.
@pytest.mark.timeout(900)
async def test_no_request_is_answered_5xx_or_otherwise_than_documented(tmp_path: Path) -> None:
    options = {
        "phases": "coverage,fuzzing",
        "max-examples": EXAMPLES,
        "seed": 0,
        # A valid request may ask for a token that the model does not have: which ones it has, no schema can say.
        "exclude-checks": "positive_data_acceptance",
        "generation-database": "none",
    }
    with running_redis(tmp_path) as redis:
        async with running_stack([Worker("w0")], redis_url=redis.url) as stack:
            tuner = asyncio.create_task(be_present(redis))
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "schemathesis.cli", "run", str(DOCUMENT), "--url", stack.url, "--no-color"),
                *(f"--{name}={value}" for name, value in options.items()),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=tmp_path,
            )
            message, _ = await process.communicate()
            await end_tasks([tuner])
    assert process.returncode == 0, message.decode()


async def be_present(redis: RedisServer) -> None:
    """A fine-tuner that has the model of the document's example: without one its route answers 503."""
    store = finetuner(redis)
    while True:
        await store.appear("tuner", Presence(models=["smollm2-135m-instruct"], quantizations=["none"]))
        await asyncio.sleep(2)
