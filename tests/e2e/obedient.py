"""A gateway whose model does as it is asked, so that programs with an agent in them run to their end.

For `CALL name?argument=value&…` in its prompt the model calls this tool once, then repeats the result. For `SAY text`
it writes the text. Values and texts are quoted as in a URL.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import parse_qsl, unquote

from ryzanstein.v1 import worker_pb2

from tests.integration.gateway.fleet import EOS, Worker
from tests.integration.gateway.gateways import GatewayStack, running_stack
from tests.integration.gateway.test_chat_prompts import text_of
from tests.unit.gateway.made_tokenizers import byte_level

CONTEXT = 600_000  # tokens are about a byte each: room for the 60 KB of tools and rules that agents send
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }}\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CALL = re.compile(r"CALL ([\w-]+)\?([\w.%/=&~-]*)")
_SAY = re.compile(r"SAY ([\w.%~-]+)")
_RESULT = re.compile(r"<\|im_start\|>tool\n(.*?)<\|im_end\|>", re.DOTALL)


def answer(prompt: str) -> str:
    """The answer to a prompt of `TEMPLATE`."""
    if message := _SAY.findall(prompt):
        return unquote(message[-1])
    calls = list(_CALL.finditer(prompt))
    if calls and (results := _RESULT.findall(prompt, calls[-1].end())):
        return f"The tool says: {results[-1]}"
    offered = prompt.split("<|im_start|>")[0].split()
    if calls and calls[-1][1] in offered:
        call = {"name": calls[-1][1], "arguments": dict(parse_qsl(calls[-1][2]))}
        return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    return "Well."


class ObedientWorker(Worker):
    """Writes the answer of each request."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._answers: dict[str, list[int]] = {}

    def answer(self, prompt: str) -> str:
        """The text of an answer."""
        return answer(prompt)

    def _answer(self, submit: worker_pb2.Submit) -> list[int]:
        if submit.request_id not in self._answers:
            self._answers[submit.request_id] = byte_level().encode(self.answer(text_of(submit.prompt_ids))).ids
        return self._answers[submit.request_id]

    def _id(self, submit: worker_pb2.Submit, index: int) -> int:
        ids = self._answer(submit)
        return ids[index] if index < len(ids) else EOS

    def _stops(self, submit: worker_pb2.Submit, position: int) -> bool:
        return position > len(self._answer(submit))


@asynccontextmanager
async def obedient_stack() -> AsyncIterator[GatewayStack]:
    """A gateway, a router and this worker."""
    card = worker_pb2.ModelCard(max_model_len=CONTEXT)
    async with running_stack([ObedientWorker("w0", template=TEMPLATE, abilities=card)]) as stack:
        yield stack
