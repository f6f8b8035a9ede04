"""`ryzanstein chat` and `ryzanstein status` in a terminal, with a gateway and a router."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

from typer.testing import CliRunner, Result

from services.cli.main import app
from services.common.ports import free_port
from services.gateway.tenants.keys import digest_of
from tests.integration.gateway.fleet import MODEL, Worker
from tests.integration.gateway.gateways import GatewayStack, running_stack
from tests.unit.gateway.made_tokenizers import byte_level

TURN = byte_level().token_to_id("<|im_start|>")
COMMAND = str(Path(sys.executable).parent / "ryzanstein")


async def command(*arguments: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, app, arguments, input="a question")


async def test_a_conversation_in_a_terminal_goes_on_until_its_end_is_typed(stack: GatewayStack) -> None:
    terminal, typed = os.openpty()
    chat = await asyncio.create_subprocess_exec(
        COMMAND, "chat", "--url", stack.url, "--max-tokens", "4", stdin=typed, stdout=PIPE, stderr=PIPE
    )
    os.write(terminal, b"one\n\ntwo\n\x04")
    out, err = await chat.communicate()
    os.close(terminal)
    os.close(typed)
    first, second = stack.workers[0].submits
    assert chat.returncode == 0, err
    assert f"Talking to {MODEL}; Ctrl-D ends." in err.decode()
    assert out.decode().count("\n") >= 2
    turns = [list(submit.prompt_ids).count(TURN) for submit in (first, second)]
    assert turns == [2, 4], "a question and its answer are sent before the next one"
    assert len({route.session for route in stack.router.routes}) == 1


async def test_gateway_rejection_is_printed_on_a_single_line() -> None:
    keys = json.dumps([{"key_sha256": digest_of("k"), "name": "k"}])
    async with running_stack([Worker("w0")], tenancy=True, api_keys=keys) as stack:
        for model in ((), ("--model", MODEL)):
            message = (await command("chat", "--url", stack.url, *model)).stderr
            assert message == "ryzanstein: An API key is needed: send the header `Authorization: Bearer <key>`.\n"
    async with running_stack([]) as stack:
        assert (await command("chat", "--url", stack.url)).stderr == f"ryzanstein: {stack.url} serves no model\n"


async def test_the_status_says_that_the_coordinator_is_away(stack: GatewayStack) -> None:
    where = ("status", "--router", stack.router.address, "--coordinator", f"127.0.0.1:{free_port()}")
    shown = await command(*where)
    assert "KV coordinator: does not answer; placement goes on without prefix credit" in shown.stdout
    state = json.loads((await command(*where, "--json")).stdout)
    assert state["kv_coordinator"] is None
    assert [worker["worker_id"] for worker in state["router"]["workers"]] == ["w0"]
