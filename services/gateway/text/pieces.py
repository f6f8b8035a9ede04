"""Reads the text of each token id from a tokenizer's description of its decoder.

A Hugging Face ``tokenizer.json`` names its decoder. Two families are supported exactly:

* byte-level (GPT-2, Llama 3, Qwen): every token is a run of bytes, the text is the UTF-8 reading of all bytes;
* sentencepiece (Llama 2, Mistral, Gemma, T5): a token is text with ``▁`` for a space, or one byte ``<0xNN>``.

For any other decoder :func:`read_scheme` returns None, and the caller decodes windows of ids.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes: character -> byte (Radford et al. 2019, released encoder)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    hidden = (byte for byte in range(256) if byte not in set(printable))
    return alphabet | {chr(256 + offset): byte for offset, byte in enumerate(hidden)}


@dataclass(frozen=True, slots=True)
class ByteLevelScheme:
    """Tokens are bytes in GPT-2's alphabet."""

    alphabet: dict[str, int]

    def piece(self, token: str) -> bytes:
        """The bytes of a token; a token outside the alphabet (an added token) is its own text."""
        try:
            return bytes([self.alphabet[char] for char in token])
        except KeyError:
            return token.encode("utf-8", errors="replace")


@dataclass(frozen=True, slots=True)
class SentencePieceScheme:
    """Tokens are text after `replacements`; `<0xNN>` tokens are bytes when `byte_fallback`."""

    replacements: tuple[tuple[str, str], ...]
    byte_fallback: bool
    strip_start: int  # leading spaces that are stripped from the start of a text
    first_token_loses: str = ""  # Metaspace: a character that is removed from the first token

    def piece(self, token: str) -> str | int:
        """A token's text, or the value of a byte token."""
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return int(match[1], 16)
        for old, new in self.replacements:
            token = token.replace(old, new)
        return token

    def first_piece(self, token: str) -> str | int:
        """`piece` for the first token of a text."""
        return self.piece(token.replace(self.first_token_loses, "") if self.first_token_loses else token)


Scheme = ByteLevelScheme | SentencePieceScheme


def read_scheme(tokenizer: Tokenizer) -> Scheme | None:
    """The scheme of a tokenizer's decoder, or None for an unknown decoder."""
    decoder = json.loads(tokenizer.to_str())["decoder"]
    if decoder is None:
        return None
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return ByteLevelScheme(_byte_level_alphabet())
    if [step["type"] for step in steps] == ["Metaspace"]:
        return _metaspace(steps[0])
    return _sentencepiece(steps)


def _metaspace(step: dict[str, Any]) -> SentencePieceScheme:
    replacement = step["replacement"]
    loses = "" if step.get("prepend_scheme", "always") == "never" else replacement
    return SentencePieceScheme(((replacement, " "),), byte_fallback=False, strip_start=0, first_token_loses=loses)


def _sentencepiece(steps: list[dict[str, Any]]) -> SentencePieceScheme | None:
    """[Replace..., ByteFallback?, Fuse, Strip(" ", start)?] in this order, or None."""
    replacements, byte_fallback, strip_start = [], False, 0
    order = {"Replace": 0, "ByteFallback": 1, "Fuse": 2, "Strip": 3}
    kinds = [step["type"] for step in steps]
    if any(kind not in order for kind in kinds) or "Fuse" not in kinds:
        return None
    if [order[kind] for kind in kinds] != sorted(order[kind] for kind in kinds):
        return None
    for step in steps:
        if step["type"] == "Replace":
            if "String" not in step["pattern"]:
                return None
            replacements.append((step["pattern"]["String"], step["content"]))
        elif step["type"] == "ByteFallback":
            byte_fallback = True
        elif step["type"] == "Strip":
            if step["content"] != " " or step["stop"] != 0:
                return None
            strip_start += step["start"]
    return SentencePieceScheme(tuple(replacements), byte_fallback, strip_start)
