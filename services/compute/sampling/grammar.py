"""Grammar-constrained sampling: masks the tokens that a request's grammar does not allow next.

Every rank holds a matcher for each slot with a grammar. All ranks draw the same tokens and advance their matchers
alike, so no matcher state is exchanged, and a step can be planned while the step before it is computed. A thread
builds the matcher from the admission on, concurrently with the first forward pass, and feeds it the tokens that were
generated earlier (resume, preemption).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray
from ryzanstein.v1.worker_pb2 import Sampling
from torch import Tensor

from services.common.grammar import explain, parser_limits

_KEPT_GRAMMARS = 64  # compiled grammars, least recently used evicted first
_MESSAGE_CHARS = 300

Vocabulary = Callable[[], LLTokenizer]  # raises ValueError for a tokenizer that grammars cannot use


def no_vocabulary() -> LLTokenizer:
    """The vocabulary of a model without a tokenizer: raises ValueError."""
    raise ValueError("there is none")


class GrammarError(Exception):
    """A grammar cannot be compiled or matched; the message says why."""


class Grammars:
    """Builds matchers as copies of their grammar's initial matcher. One thread at a time may use it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._tokenizer: LLTokenizer | None = None
        self._initial: OrderedDict[str, LLMatcher] = OrderedDict()

    def begin(self, grammar: str, generated: Sequence[int]) -> LLMatcher:
        """Return a matcher that has consumed `generated`. Raises GrammarError."""
        matcher = self._initial.get(grammar)
        if matcher is None:
            matcher = LLMatcher(self._known_vocabulary(), grammar, log_level=0, limits=parser_limits())
            _check(matcher)
            self._initial[grammar] = matcher
            if len(self._initial) > _KEPT_GRAMMARS:
                self._initial.popitem(last=False)
        self._initial.move_to_end(grammar)
        matcher = matcher.deep_copy()
        matcher.consume_tokens(list(generated))
        _check(matcher)
        return matcher

    @property
    def vocab_size(self) -> int:
        """Number of tokens with a bit in a mask; 0 before the first matcher is built."""
        return 0 if self._tokenizer is None else self._tokenizer.vocab_size

    def _known_vocabulary(self) -> LLTokenizer:
        if self._tokenizer is None:
            try:
                self._tokenizer = self._vocabulary()
            except ValueError as error:
                raise GrammarError(f"the model's tokenizer cannot be constrained: {error}") from error
        return self._tokenizer


def message_of(matcher: LLMatcher) -> str:
    """Why a matcher has failed, on one line."""
    return explain(matcher.get_error())[:_MESSAGE_CHARS]


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise GrammarError(message_of(matcher))


class Matchers:
    """The slots' matchers, and the masks for this rank's columns of the vocabulary."""

    def __init__(
        self, vocabulary: Vocabulary, vocab_start: int, vocab_local: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._grammars = Grammars(vocabulary)
        self._builder = ThreadPoolExecutor(1, "grammar")
        self._start, self._width = vocab_start, vocab_local
        self._eos = list(eos_token_ids)
        self._building: dict[int, Future[LLMatcher]] = {}
        self._of: dict[int, LLMatcher] = {}  # without failed matchers, whose slots' tokens are discarded
        self._keeps_on: dict[int, bool] = {}
        self._failures: dict[int, str] = {}

    def admit(self, slot: int, sampling: Sampling, generated: NDArray[np.int32]) -> None:
        """Start building a request's matcher."""
        self._building[slot] = self._builder.submit(self._grammars.begin, sampling.grammar, generated.tolist())
        self._keeps_on[slot] = sampling.ignore_eos

    def release(self, slot: int) -> None:
        """Remove a slot's matcher, if any."""
        if self._keeps_on.pop(slot, None) is not None:
            self._building.pop(slot, None)
            self._of.pop(slot, None)
            self._failures.pop(slot, None)

    def mask(self, logits: Tensor, rows: NDArray[np.int64], slots: NDArray[np.int64], early: NDArray[np.bool_]) -> None:
        """Mask the tokens that the rows' grammars do not allow, in place in `logits` [n, vocab_local].

        `rows`, `slots` and `early` have one entry per constrained row. EOS is masked too where `early` is set or the
        request ignores EOS, unless the grammar allows no other token.
        """
        self._take_built(slots.tolist())
        active = np.array([slot in self._of for slot in slots.tolist()], np.bool_)
        rows, slots, early = rows[active], slots[active], early[active]
        if not len(rows):
            return
        allowed = self._allowed(slots.tolist())
        going_on = early | np.array([self._keeps_on[slot] for slot in slots.tolist()], np.bool_)
        ended = self._put_off(allowed, going_on)
        if len(ended):  # the ban of `min_tokens` has masked their only allowed tokens
            logits[torch.from_numpy(rows[ended]).to(logits.device)] = 0.0
        columns = torch.from_numpy(self._columns(allowed)).to(logits.device)
        never = torch.tensor(-torch.inf, device=logits.device)
        if len(rows) == len(logits):
            torch.where(columns, logits, never, out=logits)  # takes two thirds of masked_fill_'s time
        else:
            at = torch.from_numpy(rows).to(logits.device)
            logits[at] = torch.where(columns, logits[at], never)

    def advance(self, slots: Sequence[int], token_ids: Sequence[int]) -> dict[int, str]:
        """Consume a drawn token of each of `slots`; returns the failures since the last call, by slot."""
        for slot, token in zip(slots, token_ids, strict=True):
            matcher = self._of.get(slot)
            if matcher is not None and not matcher.consume_token(token):
                self._fail(slot, matcher)
        failures, self._failures = self._failures, {}
        return failures

    def forced(self, slot: int) -> tuple[int, ...]:
        """Return the tokens that continue the slot's text in the only way that its grammar allows; often none."""
        matcher = self._of.get(slot)
        return () if matcher is None or matcher.is_stopped() else tuple(matcher.compute_ff_tokens())

    def _take_built(self, slots: list[int]) -> None:
        """Move the matchers of `slots` out of `_building`, waiting for unfinished ones."""
        for slot in slots:
            built = self._building.pop(slot, None)
            if built is None:
                continue
            try:
                self._of[slot] = built.result()
            except GrammarError as error:
                self._failures[slot] = str(error)

    def _allowed(self, slots: list[int]) -> NDArray[np.uint8]:
        """Return the slots' masks with a bit per token: [n, bytes]; all ones for a matcher that fails here."""
        # Sequentially: a mask over 4,000 tokens takes 3 µs, waking a thread takes 50 µs and more.
        n_words = -(-self._grammars.vocab_size // 32)
        allowed = np.empty((len(slots), n_words), np.int32)
        for row, slot in zip(allowed, slots, strict=True):
            matcher = self._of[slot]
            matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            if matcher.is_error():
                self._fail(slot, matcher)
                row.fill(-1)
        return allowed.view(np.uint8)

    def _put_off(self, allowed: NDArray[np.uint8], going_on: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Mask EOS in the rows `going_on` that allow other tokens; returns the rows that allow nothing else."""
        rows = np.flatnonzero(going_on)
        if not len(rows):
            return rows
        without = allowed[rows]
        for token in self._eos:
            without[:, token // 8] &= np.uint8(0xFF ^ (1 << token % 8))
        free = without.any(axis=1)
        allowed[rows[free]] = without[free]
        return rows[~free]

    def _columns(self, bits: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Return this rank's columns of masks `bits` [n, bytes]; False for padding of the vocabulary."""
        first, last = self._start // 8, -(-(self._start + self._width) // 8)
        columns = np.unpackbits(bits[:, first:last], axis=1, bitorder="little")
        columns = columns[:, self._start % 8 : self._start % 8 + self._width]
        if columns.shape[1] < self._width:
            columns = np.pad(columns, ((0, 0), (0, self._width - columns.shape[1])))
        return columns.view(np.bool_)

    def _fail(self, slot: int, matcher: LLMatcher) -> None:
        self._of.pop(slot, None)
        self._failures[slot] = message_of(matcher)
