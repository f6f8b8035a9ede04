"""Drawn text follows its grammar, whatever the ranks, filters and interruptions; who cannot be followed fails alone."""

from __future__ import annotations

import re
from copy import deepcopy

import numpy as np
import pytest
import torch
from llguidance import LLMatcher, LLTokenizer
from ryzanstein.v1.worker_pb2 import Sampling

from services.compute.backends.collectives import Communicator
from services.compute.model.loading.vocabulary import read_vocabulary
from services.compute.sampling.grammar import Matchers
from services.compute.sampling.sampler import Sampler
from tests.models import BUNDLED_MODEL
from tests.unit.compute.sampling.drawing import TORCH, admission, part_of
from tests.unit.compute.sampling.thread_group import on_ranks

VOCAB, EOS = 4096, (1, 0)
PADDED = VOCAB + 32  # as where a vocabulary does not divide by the ranks
WORDS = r"([a-z]{1,6} ){2,4}[0-9]{2}"


def vocabulary() -> LLTokenizer:
    return read_vocabulary(BUNDLED_MODEL, VOCAB, EOS)


def params(regex: str, **fields: object) -> Sampling:
    grammar = LLMatcher.grammar_from_regex(regex)
    return changed(Sampling(temperature=1.0, grammar=grammar, stop_token_ids=EOS), **fields)


def changed(sampling: Sampling, **fields: object) -> Sampling:
    sampling = deepcopy(sampling)
    for name in fields:
        sampling.ClearField(name)  # type: ignore[arg-type]
    sampling.MergeFrom(Sampling(**fields))  # type: ignore[arg-type]
    return sampling


def generate(
    rows: list[Sampling], steps: int, *, ranks: int = 1, known: list[list[int]] | None = None
) -> tuple[list[list[int]], dict[int, str]]:
    """Tokens by row, from logits that depend on row and position alone, up to an end token; and the failures."""
    known = known or [[] for _ in rows]
    tokens = [list(part) for part in known]
    failed: dict[int, str] = {}

    def body(comm: Communicator) -> tuple[list[list[int]], dict[int, str]]:
        width = PADDED // comm.size
        sampler = Sampler(
            comm, TORCH.logit_shard(comm.rank * width, width), vocab_local=width, max_running=len(rows),
            device=torch.device("cpu"), vocabulary=vocabulary, eos_token_ids=EOS,
        )  # fmt: skip
        mine, failures = [list(part) for part in tokens], dict(failed)
        for slot, row in enumerate(rows):
            sampler.admit(*admission(slot, row, [5, 6, *mine[slot]], 2))
        for _ in range(steps):
            running = [i for i in range(len(rows)) if i not in failures and not set(mine[i]) & set(EOS)]
            if not running:
                break
            positions = np.array([2 + len(mine[i]) for i in running])
            seeds = [1000 * i + int(at) for i, at in zip(running, positions, strict=True)]
            logits = torch.stack([torch.randn(PADDED, generator=torch.Generator().manual_seed(s)) for s in seeds])
            logits[:, VOCAB:] = -torch.inf
            draws = sampler.draw(part_of(logits, comm), np.array(running), positions)
            failures |= draws.failures
            for i, token in zip(running, draws.token_ids.tolist(), strict=True):
                mine[i].append(token)
        return mine, failures

    first, *others = on_ranks(ranks, body)
    assert all(other == first for other in others)
    return first


def text(tokens: list[int]) -> str:
    return vocabulary().decode_str([token for token in tokens if token not in EOS])


VARIETY = [
    params(WORDS),
    params(WORDS, temperature=0.0),
    params(WORDS, top_k=20, seed=3),
    params(WORDS, top_p=0.5, min_p=0.01, seed=4),
    params(WORDS, repetition_penalty=1.3, frequency_penalty=0.5, logit_bias={90: 50.0}),
    params(WORDS, min_tokens=3, logprobs=2),
]


def test_text_follows_its_grammar_on_any_number_of_ranks() -> None:
    rows = [*VARIETY, Sampling(temperature=1.0, stop_token_ids=EOS)]
    alone, failures = generate(rows, 60)
    assert not failures
    for row in alone[:-1]:
        assert row[-1] in EOS
        assert re.fullmatch(WORDS, text(row))
    assert generate(rows, 60, ranks=2) == (alone, {})


@pytest.mark.parametrize("stored", [1, 4, 9])
def test_a_resumed_request_goes_on_as_if_uninterrupted(stored: int) -> None:
    whole, _ = generate(VARIETY, 60)
    assert generate(VARIETY, 60, known=[row[:stored] for row in whole]) == (whole, {})


def test_the_end_comes_only_where_the_grammar_ends() -> None:
    until_told = [params("a?", min_tokens=5), params("ab{0,9}", ignore_eos=True), params("ab{0,9}", min_tokens=4)]
    likely_end = [changed(row, logit_bias={EOS[0]: 90.0}) for row in until_told]
    (optional, ignored, least), failures = generate(likely_end, 40)
    assert not failures
    assert (text(optional), optional[-1] in EOS) == ("a", True)  # nothing else can follow
    assert text(ignored) == "abbbbbbbbb"
    assert len(least) >= 4
    (at_once,), _ = generate([params("ab{0,9}", logit_bias={EOS[0]: 90.0})], 40)
    assert len(text(at_once)) < len("abbbbbbbbb")  # the others were kept from this text


def test_a_request_that_leaves_its_grammar_fails_alone() -> None:
    fine = [params(WORDS, seed=7), Sampling(temperature=1.0, seed=8)]
    alone, _ = generate(fine, 20)
    strayed = vocabulary().tokenize_str("123")
    tokens, failures = generate([*fine, params(WORDS), params("[")], 20, known=[[], [], strayed, []])
    assert tokens[:2] == alone
    assert failures.keys() == {2, 3}
    assert "regex" in failures[3]


def test_a_token_that_the_grammar_does_not_allow_fails_its_request_once() -> None:
    matchers = Matchers(vocabulary, 0, VOCAB, EOS)
    matchers.admit(3, params("[0-9]"), np.array([], np.int32))
    matchers.mask(torch.zeros(1, VOCAB), np.array([0]), np.array([3]), np.array([False]))
    strayed = vocabulary().tokenize_str("x")[0]
    assert matchers.advance([3], [strayed]).keys() == {3}
    assert not matchers.advance([3], [strayed])


def test_a_model_without_a_usable_tokenizer_fails_such_requests_only() -> None:
    sampler = Sampler(
        on_ranks(1, lambda comm: comm)[0],
        TORCH.logit_shard(0, VOCAB),
        vocab_local=VOCAB,
        max_running=1,
        device=torch.device("cpu"),
    )
    sampler.admit(*admission(0, params(WORDS), [5], 1))
    assert "cannot be constrained" in sampler.draw(torch.zeros(1, VOCAB), np.array([0]), np.array([1])).failures[0]
