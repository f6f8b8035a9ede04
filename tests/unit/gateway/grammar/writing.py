"""Texts as an untrained model writes them under a grammar: random tokens that it allows."""

from __future__ import annotations

import random
from functools import cache

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from services.common.grammar import parser_limits
from services.compute.model.loading.vocabulary import read_vocabulary
from tests.models import BUNDLED_MODEL

VOCAB, EOS = 4096, 1
_LONG = 24  # tokens after which an end is looked for
_GIVEN_UP = 400
_CLOSING = '"}]'


@cache
def vocabulary() -> LLTokenizer:
    return read_vocabulary(BUNDLED_MODEL, VOCAB, (EOS,))


@cache
def _closers() -> list[int]:
    return [token for char in _CLOSING for token in vocabulary().tokenize_str(char)]


def matcher_of(grammar: str) -> LLMatcher:
    return LLMatcher(vocabulary(), grammar, log_level=0, limits=parser_limits())


def error_of(grammar: str) -> str:
    matcher = matcher_of(grammar)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher.get_error()


def accepts(grammar: str, text: str) -> bool:
    matcher = matcher_of(grammar)
    assert not matcher.is_error(), matcher.get_error()
    tokens = vocabulary().tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def write(grammar: str, seed: int) -> str | None:
    """A text of the grammar; None when chance finds no end in time."""
    draw, matcher, tokens = random.Random(seed), matcher_of(grammar), list[int]()
    bits = allocate_token_bitmask(1, VOCAB)
    while len(tokens) < _GIVEN_UP:
        fill_next_token_bitmask(matcher, bits)
        allowed = np.flatnonzero(np.unpackbits(bits[0].view(np.uint8), bitorder="little")).tolist()
        token = _draw(draw, allowed, long=len(tokens) > _LONG)
        if token == EOS:
            return str(vocabulary().decode_str(tokens))
        tokens.append(token)
        assert matcher.consume_token(token)
        if matcher.is_stopped():
            return str(vocabulary().decode_str([token for token in tokens if token != EOS]))
    return None


def _draw(draw: random.Random, allowed: list[int], *, long: bool) -> int:
    ends = [token for token in ([EOS, *_closers()] if long else [EOS]) if token in allowed]
    if ends and (long or draw.random() < 0.3):
        return ends[0]
    return draw.choice(allowed)
