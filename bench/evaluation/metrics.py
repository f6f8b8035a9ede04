"""Perplexity, bits per byte, agreement and divergence, with intervals by bootstrap over documents."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from bench.evaluation.served import Position, ScoredDocument

RESAMPLES = 2_000
_SMALLEST = 1e-12  # probability of all other tokens, if rounding leaves none


@dataclass(frozen=True)
class Estimate:
    """A value and its 95 % confidence interval; None for a single document."""

    value: float
    interval: tuple[float, float] | None


@dataclass(frozen=True)
class Comparison:
    """A candidate against its reference on the same documents. Ratios and differences are paired."""

    documents: int
    tokens: int
    text_bytes: int
    reference_perplexity: Estimate
    perplexity: Estimate
    perplexity_ratio: Estimate
    reference_bits_per_byte: Estimate
    bits_per_byte: Estimate
    top1_agreement: Estimate
    kl_nats: Estimate  # mean per token, see :func:`divergence`


@dataclass(frozen=True)
class Sums:
    """Sums per document; all arrays are [n_documents]."""

    tokens: np.ndarray
    text_bytes: np.ndarray
    reference_nats: np.ndarray
    nats: np.ndarray
    agreed: np.ndarray
    kl: np.ndarray

    def of(self, rows: np.ndarray) -> Sums:
        """Totals over drawn documents: `rows` is [n_resamples, n_documents], the result's arrays are [n_resamples]."""
        return Sums(*(values[rows].sum(axis=1) for values in vars(self).values()))


def divergence(reference: Position, candidate: Position) -> float:
    """KL(reference || candidate) in nats, over the tokens that both report and one bucket for all others.

    Merging tokens into a bucket can only lower the divergence. So this is a lower bound of the KL over the vocabulary,
    and a close one, since both report their 20 likeliest tokens.
    """
    shared = reference.known.keys() & candidate.known.keys()
    total, rest_p, rest_q = 0.0, 1.0, 1.0
    for token_id in shared:
        log_p, log_q = reference.known[token_id], candidate.known[token_id]
        total += math.exp(log_p) * (log_p - log_q)
        rest_p -= math.exp(log_p)
        rest_q -= math.exp(log_q)
    rest_p, rest_q = max(rest_p, _SMALLEST), max(rest_q, _SMALLEST)
    return total + rest_p * math.log(rest_p / rest_q)


def add_up(reference: Sequence[ScoredDocument], candidate: Sequence[ScoredDocument]) -> Sums:
    """Sums per document; both hold the same documents in the same order."""
    rows = []
    for expected, got in zip(reference, candidate, strict=True):
        assert expected.document == got.document
        pairs = list(zip(expected.positions, got.positions, strict=True))
        rows.append(
            (
                len(pairs),
                len(got.document.text.encode()),
                -sum(a.logprob for a, _ in pairs),
                -sum(b.logprob for _, b in pairs),
                sum(a.best == b.best for a, b in pairs),
                sum(divergence(a, b) for a, b in pairs),
            )
        )
    return Sums(*np.array(rows, dtype=np.float64).T)


def compare(reference: Sequence[ScoredDocument], candidate: Sequence[ScoredDocument], seed: int = 0) -> Comparison:
    """Compute all measures. The bootstrap draws documents, since tokens of one document are not independent."""
    sums = add_up(reference, candidate)
    n = len(sums.tokens)
    whole = sums.of(np.arange(n)[None])
    drawn = sums.of(np.random.default_rng(seed).integers(n, size=(RESAMPLES, n)))

    def estimate(measure: Callable[[Sums], np.ndarray]) -> Estimate:
        low, high = np.percentile(measure(drawn), [2.5, 97.5])
        return Estimate(float(measure(whole)[0]), (float(low), float(high)) if n > 1 else None)

    return Comparison(
        documents=n,
        tokens=int(whole.tokens[0]),
        text_bytes=int(whole.text_bytes[0]),
        reference_perplexity=estimate(lambda s: np.exp(s.reference_nats / s.tokens)),
        perplexity=estimate(lambda s: np.exp(s.nats / s.tokens)),
        perplexity_ratio=estimate(lambda s: np.exp((s.nats - s.reference_nats) / s.tokens)),
        reference_bits_per_byte=estimate(lambda s: s.reference_nats / math.log(2) / s.text_bytes),
        bits_per_byte=estimate(lambda s: s.nats / math.log(2) / s.text_bytes),
        top1_agreement=estimate(lambda s: s.agreed / s.tokens),
        kl_nats=estimate(lambda s: s.kl / s.tokens),
    )
