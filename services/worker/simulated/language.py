"""The language that simulated ranks speak: every token is a hash of all tokens before it.

So an answer is a pure function of its request, as a model's is, and a client that knows the rule can check it to the
byte. The hash runs over the KV blocks: a block's KV is the hash of its tokens and of the block before. A wrong block
in a table therefore changes the answer, as it would change a model's.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Sequence
from hashlib import blake2b

from ryzanstein.v1.worker_pb2 import Sampling
from tokenizers import Tokenizer

from services.compute.token_logprobs import TokenLogprobs

KV_BYTES = 8  # bytes of a block's hash
_WORDS = 4096  # different words; a larger vocabulary makes texts no better


class Language:
    """The next token after known ones. `block_tokens` is a constant of the language: hashes are chained by it."""

    def __init__(
        self, words: Sequence[int], eos_token_ids: Sequence[int], answer_tokens: int, block_tokens: int
    ) -> None:
        """`answer_tokens`: mean length of an answer that may end by itself."""
        self.words = tuple(words)
        self._eos = eos_token_ids[0] if eos_token_ids else -1
        self._answer_tokens = answer_tokens
        self.block_tokens = block_tokens

    @staticmethod
    def chain(parent: bytes, token_ids: array[int]) -> bytes:
        """The KV of a block."""
        return blake2b(token_ids.tobytes(), key=parent, digest_size=KV_BYTES).digest()

    def draw(self, parent: bytes, tail: array[int], n_generated: int, sampling: Sampling) -> int:
        """The token after `tail`, the known tokens since the last full block, whose KV is `parent`.

        A seed changes the tokens where a model would draw them, at a temperature above 0.
        """
        seed = sampling.seed.to_bytes(8, "little") if sampling.temperature > 0 else b""
        number = int.from_bytes(blake2b(tail.tobytes(), key=parent, salt=seed, digest_size=8).digest(), "little")
        number, ending = divmod(number, self._answer_tokens)
        if not ending and n_generated >= sampling.min_tokens and self._eos in sampling.stop_token_ids:
            return self._eos
        return self.words[number % len(self.words)]

    def continuation(self, prompt_ids: Sequence[int], sampling: Sampling, root: bytes = b"") -> list[int]:
        """The whole answer to a prompt, its last token included, of at most `sampling.max_tokens`."""
        known, parent, size = array("I", prompt_ids), root, self.block_tokens
        for start in range(0, len(known) // size * size, size):
            parent = self.chain(parent, known[start : start + size])
        generated: list[int] = []
        stops = frozenset(sampling.stop_token_ids)
        while len(generated) < sampling.max_tokens:
            token = self.draw(parent, known[len(known) // size * size :], len(generated), sampling)
            known.append(token)
            generated.append(token)
            if len(known) % size == 0:
                parent = self.chain(parent, known[-size:])
            if token in stops:
                break
        return generated

    def score(self, token: int, n_top: int) -> TokenLogprobs:
        """Log-probabilities of a token: every further alternative is half as likely as the one before."""
        others = (word for word in self.words if word != token)
        top_ids = (token, *(next(others) for _ in range(n_top - 1)))[:n_top]
        return TokenLogprobs(
            token, -math.log(2), 1, top_ids, tuple(-(n + 1) * math.log(2) for n in range(len(top_ids)))
        )

    @staticmethod
    def embedding(kv: bytes, size: int) -> tuple[float, ...]:
        """A vector of length 1 for a text whose hash is `kv`."""
        draw = random.Random(kv)
        values = [draw.gauss(0, 1) for _ in range(size)]
        length = math.sqrt(sum(value * value for value in values))
        return tuple(value / length for value in values)


def read_words(tokenizer_json: bytes, vocab_size: int) -> list[int]:
    """Ids of tokens that decode to a blank and a word of letters; every ordinary token if there are none."""
    tokenizer = Tokenizer.from_buffer(tokenizer_json)
    added = tokenizer.get_added_tokens_decoder().keys()
    ordinary = [token for token in range(min(vocab_size, tokenizer.get_vocab_size())) if token not in added]
    words = [token for token in ordinary if _is_word(tokenizer.decode([token, token]))]
    return words[:_WORDS] or ordinary


def _is_word(text: str) -> bool:
    """Whether a token's text, twice, is a word that begins with a blank, which some decoders leave off in front."""
    first, blank, second = text.strip().partition(" ")
    return bool(blank) and first == second and first.isascii() and first.isalpha()
