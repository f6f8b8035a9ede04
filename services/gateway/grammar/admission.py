"""Checks a request's grammar: a separate process compiles each grammar once, within a time limit."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import sys
import time
from collections import OrderedDict
from dataclasses import dataclass
from hashlib import sha256

from services.common.grammar import MAX_GRAMMAR_BYTES
from services.gateway.api.chat import CHAT_COMPLETIONS, FieldNames
from services.gateway.api.options import TextOptions
from services.gateway.errors import ApiError, invalid
from services.gateway.grammar.formats import Constraint, constraint_of, wants_grammar
from services.gateway.text.codec import ServedModel

_START_S = 20.0  # to start the process and to load a model's tokenizer: usually about a second
_KEPT_VERDICTS = 1024
_LATE_AGAIN_S = 30.0  # a grammar that timed out is not tried again for this long
_MESSAGE_CHARS = 400
_UNSUPPORTED = re.compile(r"Unimplemented keys: (\[.*\])")


@dataclass(frozen=True, slots=True)
class _Verdict:
    error: str | None
    grammar: str | None = None  # the converted grammar, when it was converted
    until: float = math.inf  # monotonic


class GrammarCompiler:
    """Checks whether workers can follow a grammar, one grammar at a time, each within `timeout_s`."""

    def __init__(self, timeout_s: float, *, closed: bool) -> None:
        """`closed`: an object without `additionalProperties` allows only the properties that its schema names."""
        self._timeout_s = timeout_s
        self._closed = closed
        self._turn = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._told: dict[str, ServedModel] = {}  # models whose tokenizer the process has, by name
        self._verdicts: OrderedDict[bytes, _Verdict] = OrderedDict()

    async def constraint(self, options: TextOptions, names: FieldNames = CHAT_COMPLETIONS) -> Constraint | None:
        """The structured output that the options ask for; raises :class:`ApiError` (400)."""
        if not wants_grammar(options):
            return None
        return await asyncio.to_thread(constraint_of, options, names, closed=self._closed)

    async def admit(self, constraint: Constraint, model: ServedModel) -> str:
        """The grammar for the workers; raises :class:`ApiError` (400) with the reason if they cannot follow it."""
        size = len(constraint.grammar.encode())
        if size > MAX_GRAMMAR_BYTES:
            message = f"`{constraint.field}` may have at most {MAX_GRAMMAR_BYTES} bytes as a grammar, got {size}."
            raise invalid(message, constraint.field, "invalid_grammar")
        key = sha256(f"{model.card.hash_root}\0{constraint.foreign}\0{constraint.grammar}".encode()).digest()
        if not self._knows(key):
            async with self._turn:
                if not self._knows(key):
                    self._remember(key, await self._compile(constraint, model))
        verdict = self._verdicts[key]
        if verdict.error is not None:
            raise _refusal(constraint.field, verdict.error)
        return constraint.grammar if verdict.grammar is None else verdict.grammar

    async def aclose(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        self._told.clear()
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def _knows(self, key: bytes) -> bool:
        verdict = self._verdicts.get(key)
        if verdict is None or verdict.until < time.monotonic():
            return False
        self._verdicts.move_to_end(key)
        return True

    def _remember(self, key: bytes, verdict: _Verdict) -> None:
        self._verdicts[key] = verdict
        if len(self._verdicts) > _KEPT_VERDICTS:
            self._verdicts.popitem(last=False)

    async def _compile(self, constraint: Constraint, model: ServedModel) -> _Verdict:
        """Compile a grammar. A process that crashes or times out is ended, and the next call starts a new one."""
        try:
            async with asyncio.timeout(_START_S):
                await self._introduce(model)
            async with asyncio.timeout(self._timeout_s):
                answer = await self._ask(model, constraint)
        except TimeoutError:
            await self.aclose()
            late = f"it takes longer than {self._timeout_s:g} s to compile"
            return _Verdict(late, until=time.monotonic() + _LATE_AGAIN_S)  # a later try may succeed
        except (asyncio.IncompleteReadError, ConnectionError):
            await self.aclose()
            return _Verdict("it is nested too deeply")
        except asyncio.CancelledError:
            await self.aclose()  # else the next request would read this one's answer
            raise
        return _Verdict(answer["error"], answer.get("grammar"))

    async def _introduce(self, model: ServedModel) -> None:
        """Start the process if there is none, and send it the model's tokenizer if it does not have it."""
        if self._process is None or self._process.returncode is not None:
            await self.aclose()
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", __name__.replace("admission", "compiler"),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                start_new_session=True,  # Ctrl-C reaches only the gateway, which ends this process or closes its stdin
            )  # fmt: skip
        if self._told.get(model.name) is not model:
            card = model.card
            tokenizer = await asyncio.to_thread(card.tokenizer_json.decode)
            vocabulary = {"tokenizer": tokenizer, "vocab_size": card.vocab_size, "eos": list(card.eos_token_ids)}
            await self._send({"model": model.name, **vocabulary})
            # Wait until the tokenizer is loaded, so that the load does not count against the request's time limit.
            await self._ask(model, Constraint("", 'start: "a"'))
            self._told[model.name] = model

    async def _ask(self, model: ServedModel, constraint: Constraint) -> dict[str, str | None]:
        await self._send({"model": model.name, "grammar": constraint.grammar, "foreign": constraint.foreign})
        assert self._process is not None
        assert self._process.stdout is not None
        head = await self._process.stdout.readexactly(4)
        answer: dict[str, str | None] = json.loads(
            await self._process.stdout.readexactly(int.from_bytes(head, "little"))
        )
        return answer

    async def _send(self, request: dict[str, object]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        data = json.dumps(request).encode()
        self._process.stdin.write(len(data).to_bytes(4, "little") + data)
        await self._process.stdin.drain()


def _refusal(field: str, error: str) -> ApiError:
    if unsupported := _UNSUPPORTED.search(error):
        keywords = ", ".join(f"`{keyword}`" for keyword in json.loads(unsupported[1]))
        message = f"`{field}` uses {keywords}, which structured output does not support."
        return invalid(message, field, "unsupported_keyword")
    return invalid(f"`{field}` cannot be followed: {error[:_MESSAGE_CHARS].strip()}", field, "invalid_grammar")
