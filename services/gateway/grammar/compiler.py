"""`python -m services.gateway.grammar.compiler`: compiles grammars for the gateway, in a process that may be lost.

What clients send can overflow a stack or take minutes before any of llguidance's own bounds is reached; GBNF is
converted in Python, by regular expressions that hold the interpreter as long as they run. Here that harms nobody:
whoever waits gives up, and ends this process. Ranks are then sent only what has passed here.

Messages on stdin and stdout: 4 bytes of length, then JSON. Requests are {"model", "tokenizer": text, "vocab_size",
"eos"} once for every model, and {"model", "grammar", "foreign": bool}; only the latter are answered: {"error": text
or null, "grammar": as Lark writes it if it was foreign}.
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

# A quarter of what the ranks' threads have: what fits here does not overflow theirs.
_STACK_BYTES = 2 << 20

_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)


def main() -> None:
    """Serve until stdin ends."""
    threading.stack_size(_STACK_BYTES)
    worker = threading.Thread(target=serve, args=(sys.stdin.buffer, sys.stdout.buffer))
    worker.start()
    worker.join()


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer one request after the other."""
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
    """A grammar in GBNF's form (`root ::= ...`), or in Lark's, in Lark's. Raises ValueError."""
    if is_lark_syntax(text):
        return text
    try:
        return str(gbnf_to_lark(_ESCAPE.sub(_character, text)))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except Exception as error:  # the converter's own error is a bare Exception
        raise ValueError(str(error)) from error


def _character(escape: re.Match[str]) -> str:
    r"""A `\u` or `\U` escape of GBNF as Lark reads it: the converter would drop its leading zeros."""
    digits = escape[1] or escape[2]
    if digits is None:
        return escape[0]
    point = int(digits, 16)
    if point > 0x10FFFF or 0xD800 <= point < 0xE000:
        raise ValueError(f"`{escape[0]}` is no character")
    # ASCII stays an escape: as it is it could end a text or a range, or mean something in it.
    return f"\\x{point:02x}" if point < 0x80 else chr(point)


def compile_error(tokenizer: LLTokenizer, grammar: str) -> str | None:
    """Do what a rank does up to the first token; why it fails, or None."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    return explain(matcher.get_error()) or None


if __name__ == "__main__":
    main()
