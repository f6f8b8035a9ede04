"""`python -m services.gateway.grammar.compiler`: compiles grammars for the gateway, in a process that may crash.

A client's grammar can overflow the stack or compile for minutes before it reaches one of llguidance's limits. The
conversion of GBNF runs regular expressions in Python, which hold the GIL. In this process neither harms the gateway,
which kills it after a time-out. Ranks receive only grammars that have compiled here.

Messages on stdin and stdout: 4 bytes of length, then JSON. Requests are {"model", "tokenizer": text, "vocab_size",
"eos"} once for each model, and {"model", "grammar", "foreign": bool}. Only a grammar is answered: {"error": text or
null, "grammar": the grammar in Lark's form if it was foreign}.
"""

from __future__ import annotations

import json
import re
import sys
import threading
from typing import Any, BinaryIO

from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

from services.common.grammar import MAX_GRAMMAR_BYTES, explain, parser_limits

# A quarter of the stack of a rank's thread: a grammar that fits here cannot overflow a rank.
_STACK_BYTES = 2 << 20

_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)


def main() -> None:
    """Serve until stdin ends."""
    threading.stack_size(_STACK_BYTES)
    worker = threading.Thread(target=serve, args=(sys.stdin.buffer, sys.stdout.buffer))
    worker.start()
    worker.join()


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests, one at a time."""
    models: dict[str, LLTokenizer | str] = {}
    while head := requests.read(4):
        request = json.loads(requests.read(int.from_bytes(head, "little")))
        model = request["model"]
        if "tokenizer" in request:
            models[model] = _vocabulary(request)
            continue
        known = models[model]
        answer = json.dumps({"error": known} if isinstance(known, str) else _answer(known, request)).encode()
        answers.write(len(answer).to_bytes(4, "little") + answer)
        answers.flush()


def _vocabulary(request: dict[str, Any]) -> LLTokenizer | str:
    try:
        return LLTokenizer(request["tokenizer"], n_vocab=request["vocab_size"], eos_token=request["eos"] or None)
    except ValueError as error:
        return f"This model's tokenizer cannot be constrained: {error}"


def _answer(tokenizer: LLTokenizer, request: dict[str, Any]) -> dict[str, str | None]:
    if not request["foreign"]:
        return {"error": compile_error(tokenizer, request["grammar"])}
    try:
        grammar = as_lark(request["grammar"])
    except ValueError as error:
        return {"error": str(error)}
    if (size := len(grammar.encode())) > MAX_GRAMMAR_BYTES:
        return {"error": f"it may have at most {MAX_GRAMMAR_BYTES} bytes in Lark's form, got {size}"}
    return {"error": compile_error(tokenizer, grammar), "grammar": grammar}


def as_lark(text: str) -> str:
    """Convert a grammar in GBNF (`root ::= ...`) to Lark; one in Lark is unchanged. Raises ValueError."""
    if is_lark_syntax(text):
        return text
    try:
        return str(gbnf_to_lark(_ESCAPE.sub(_character, text)))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except Exception as error:  # the converter raises a bare Exception
        raise ValueError(str(error)) from error


def _character(escape: re.Match[str]) -> str:
    r"""Convert a `\u` or `\U` escape of GBNF to Lark, since the converter drops leading zeros."""
    digits = escape[1] or escape[2]
    if digits is None:
        return escape[0]
    point = int(digits, 16)
    if point > 0x10FFFF or 0xD800 <= point < 0xE000:
        raise ValueError(f"`{escape[0]}` is no character")
    # An ASCII character stays an escape, since it could be a delimiter or an operator.
    return f"\\x{point:02x}" if point < 0x80 else chr(point)


def compile_error(tokenizer: LLTokenizer, grammar: str) -> str | None:
    """Compile a grammar as a rank does, up to the first token; returns the error, or None."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    return explain(matcher.get_error()) or None


if __name__ == "__main__":
    main()
