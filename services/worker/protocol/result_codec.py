"""StepResult as flat int32.

header    kind, step (2 words), times (4), counts of drawn tokens, logprobs, prompt logprobs, pooled vectors,
          failures
columns   slot | token id
then      logprobs: (slot, record); prompt logprobs: (slot, n, records); pooled: (slot, n, floats); failures:
          (slot, text)
record    token id, logprob, rank, n, n token ids, n logprobs
"""

from __future__ import annotations

from array import array

from services.compute.token_logprobs import TokenLogprobs
from services.worker.protocol.plan import StepResult, StepTimes
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

_HEADER = 12


def encode_result(result: StepResult) -> memoryview:
    """Return the result as bytes."""
    times = result.times
    words = array("i", (Kind.RESULT, *split64(result.step)))
    words.extend((times.wait, times.forward, times.communication, times.sample))
    words.extend((len(result.slots), len(result.logprobs), len(result.prompt_logprobs), len(result.pooled)))
    words.append(len(result.failures))
    words.extend(result.slots)
    words.extend(result.token_ids)
    for slot, logprobs in result.logprobs.items():
        words.append(slot)
        _encode_logprobs(logprobs, words)
    for slot, rows in result.prompt_logprobs.items():
        words.extend((slot, len(rows)))
        for row in rows:
            _encode_logprobs(row, words)
    for slot, vector in result.pooled.items():
        words.extend((slot, len(vector)))
        words.extend(float_words(vector))
    for slot, failure in result.failures.items():
        words.append(slot)
        words.extend(text_words(failure))
    return memoryview(words).cast("B")


def decode_result(words: Words) -> StepResult:
    """Inverse of `encode_result`; floats are rounded to float32. Raises MalformedMessageError."""
    if len(words) < _HEADER or words[0] != Kind.RESULT:
        raise MalformedMessageError("not a result")
    low, high, *times, n, n_logprobs, n_prompt, n_pooled, n_failures = words[1:_HEADER].tolist()
    cursor = WordCursor(words, _HEADER)
    slots, token_ids = cursor.take(n).tolist(), cursor.take(n).tolist()
    result = StepResult(
        step=join64(low, high),
        slots=tuple(slots),
        token_ids=tuple(token_ids),
        logprobs={int(cursor.take(1)[0]): _decode_logprobs(cursor) for _ in range(n_logprobs)},
        prompt_logprobs=dict(_decode_prompt(cursor) for _ in range(n_prompt)),
        pooled=dict(_decode_pooled(cursor) for _ in range(n_pooled)),
        failures={int(cursor.take(1)[0]): cursor.take_text() for _ in range(n_failures)},
        times=StepTimes(*times),
    )
    cursor.finish()
    return result


def _encode_logprobs(logprobs: TokenLogprobs, words: array[int]) -> None:
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


def _decode_prompt(cursor: WordCursor) -> tuple[int, tuple[TokenLogprobs, ...]]:
    slot, n = cursor.take(2).tolist()
    return slot, tuple(_decode_logprobs(cursor) for _ in range(n))


def _decode_pooled(cursor: WordCursor) -> tuple[int, tuple[float, ...]]:
    slot, n = cursor.take(2).tolist()
    return slot, tuple(words_float(cursor.take(n)))
