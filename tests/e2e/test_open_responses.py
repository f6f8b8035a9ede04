"""Open Responses' own compliance test, against a model that answers, calls the tool it is offered and sees.

RYZANSTEIN_TEST_OPEN_RESPONSES names a folder with the repository of Open Responses and `zod`, its test's one package.
Without one, its cases are those of `tests/integration/gateway/test_open_responses.py`.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
from ryzanstein.v1 import worker_pb2

from tests.e2e.obedient import ObedientWorker
from tests.integration.gateway.fleet import MODEL
from tests.integration.gateway.gateways import running_stack
from tests.integration.gateway.redis_server import running_redis
from tests.integration.gateway.test_images import seeing
from tests.programs import program

SUITE = os.environ.get("RYZANSTEIN_TEST_OPEN_RESPONSES", "")
CALL = '<tool_call>{"name": "get_weather", "arguments": {"location": "San Francisco, CA"}}</tool_call>'
OFFERED = "{% if tools %}<tool_call>{% endif %}"  # where calls are read, and the sign of an offered tool in a prompt
CONTEXT = 8192  # tokens


class AbleWorker(ObedientWorker):
    """Calls the tool of the suite where it is offered."""

    def answer(self, prompt: str) -> str:
        """See :class:`ObedientWorker`."""
        return CALL if prompt.startswith("<tool_call>") else "Four."


def able() -> AbleWorker:
    eyes = seeing()
    assert eyes.abilities is not None
    card = worker_pb2.ModelCard(images=eyes.abilities.images, max_model_len=CONTEXT)
    return AbleWorker("w0", tokenizer=eyes.tokenizer, template=OFFERED + eyes.template, abilities=card)


@pytest.mark.skipif(not SUITE, reason="the suite is run on request: RYZANSTEIN_TEST_OPEN_RESPONSES=FOLDER")
async def test_every_case_of_the_suite_passes(tmp_path: Path) -> None:
    with running_redis(tmp_path) as server:
        async with running_stack([able()], redis_url=server.url) as stack:
            where = ("--base-url", f"{stack.url}/v1", "--api-key", "unused", "--model", MODEL)
            command = (program("bun"), "run", "bin/compliance-test.ts", *where, "--json")
            suite = await asyncio.create_subprocess_exec(*command, cwd=SUITE, stdout=asyncio.subprocess.PIPE)
            printed, _ = await suite.communicate()
    results = json.loads(printed)["results"]
    assert {result["id"]: result.get("errors") for result in results if result["status"] == "failed"} == {}
    assert {"basic-response", "tool-calling", "image-input"} <= {
        result["id"] for result in results if result["status"] == "passed"
    }
