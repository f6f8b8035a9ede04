"""StepResult as flat int32.

header    kind, step (2 words), times (4), counts of slots and of slots with more than tokens
columns   slot | count of tokens | tokens
then      for each slot with more: its index; counts of logprobs, prompt logprobs, pooled numbers and forced tokens;
          their records or words; the failure's text
record    token id, logprob, rank, n, n token ids, n logprobs
"""

from __future__ import annotations

from array import array
from itertools import accumulate, chain

from services.compute.token_logprobs import TokenLogprobs
from services.worker.protocol.plan import SlotResult, StepResult, StepTimes
from services.worker.protocol.words import (
    Kind,
    MalformedMessageError,
    WordCursor,
    Words,
    float_words,
    join64,
    split64,
    text_words,
    words_float,
)

_HEADER = 9
_NO_MORE = SlotResult(0)[2:]


def encode_result(result: StepResult) -> memoryview:
    """Return the result as bytes."""
    times, slots = result.times, result.slots
    more = [(index, slot) for index, slot in enumerate(slots) if slot[2:] != _NO_MORE]
    words = [Kind.RESULT, *split64(result.step), times.wait, times.forward, times.communication, times.sample]
    words += (len(slots), len(more))
    words.extend([slot.slot for slot in slots])
    words.extend([len(slot.token_ids) for slot in slots])
    words.extend(chain.from_iterable([slot.token_ids for slot in slots]))
    for index, slot in more:
        words.extend((index, len(slot.logprobs), len(slot.prompt_logprobs), len(slot.pooled), len(slot.forced)))
        for record in chain(slot.logprobs, slot.prompt_logprobs):
            _encode_logprobs(record, words)
        words.extend(float_words(slot.pooled))
        words.extend(slot.forced)
        words.extend(text_words(slot.failure))
    return memoryview(array("i", words)).cast("B")


def decode_result(words: Words) -> StepResult:
    """Inverse of `encode_result`; floats are rounded to float32. Raises MalformedMessageError."""
    if len(words) < _HEADER or words[0] != Kind.RESULT:
        raise MalformedMessageError("not a result")
    low, high, *times, n_slots, n_more = words[1:_HEADER].tolist()
    cursor = WordCursor(words, _HEADER)
    names, counts = cursor.take(n_slots).tolist(), cursor.take(n_slots).tolist()
    if min(counts, default=0) < 0:
        raise MalformedMessageError(f"{min(counts)} tokens")
    ends, tokens = list(accumulate(counts)), cursor.take(sum(counts)).tolist()
    rows = [tuple(tokens[end - n : end]) for n, end in zip(counts, ends, strict=True)]
    slots = list(map(SlotResult, names, rows))
    for _ in range(n_more):
        index = int(cursor.take(1)[0])
        if not 0 <= index < n_slots:
            raise MalformedMessageError(f"slot {index} of {n_slots}")
        slots[index] = _decode_more(cursor, slots[index])
    cursor.finish()
    return StepResult(join64(low, high), tuple(slots), StepTimes(*times))


def _decode_more(cursor: WordCursor, slot: SlotResult) -> SlotResult:
    n_logprobs, n_prompt, n_pooled, n_forced = cursor.take(4).tolist()
    return SlotResult(
        slot.slot,
        slot.token_ids,
        logprobs=tuple(_decode_logprobs(cursor) for _ in range(n_logprobs)),
        prompt_logprobs=tuple(_decode_logprobs(cursor) for _ in range(n_prompt)),
        pooled=tuple(words_float(cursor.take(n_pooled))),
        forced=tuple(cursor.take(n_forced).tolist()),
        failure=cursor.take_text(),
    )


def _encode_logprobs(logprobs: TokenLogprobs, words: list[int]) -> None:
    words.append(logprobs.token_id)
    words.extend(float_words((logprobs.logprob,)))
    words.extend((logprobs.rank, len(logprobs.top_ids)))
    words.extend(logprobs.top_ids)
    words.extend(float_words(logprobs.top_logprobs))


def _decode_logprobs(cursor: WordCursor) -> TokenLogprobs:
    head = cursor.take(4)
    n = int(head[3])
    return TokenLogprobs(
        token_id=int(head[0]),
        logprob=words_float(head[1:2])[0],
        rank=int(head[2]),
        top_ids=tuple(cursor.take(n).tolist()),
        top_logprobs=tuple(words_float(cursor.take(n))),
    )
