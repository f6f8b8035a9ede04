"""A model's tokenizer and chat template, made from its card."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from ryzanstein.v1 import worker_pb2
from tokenizers import Encoding, Tokenizer

from services.common.adapters import RegisteredAdapter
from services.common.blockhash import adapted_root
from services.common.floats import as_written
from services.gateway.errors import too_long
from services.gateway.text.detokenizer import Detokenizer, Vocabulary
from services.gateway.text.guard import ControlTokens, PromptPart
from services.gateway.text.template import ChatTemplate

# Up to here a tokenizer call (< 1 ms) is cheaper than handing it to a thread.
_INLINE_CHARS = 4_000
_INLINE_TOKENS = 2_000
_CHARS_PER_TOKEN = 8  # more than in any language: a longer text is probed before it is tokenized
_THREADS = 2

T = TypeVar("T")

# A batch here is a single text, for which the tokenizers library would wake its threads.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class ModelCardError(Exception):
    """A worker's model card is unusable; the message names the model and the reason."""


@dataclass(frozen=True)
class ServedModel:
    """A served model: its card, tokenizer and template."""

    card: worker_pb2.ModelCard  # an adapter has the base's card with its own name and hash root
    tokenizer: Tokenizer
    vocabulary: Vocabulary
    template: ChatTemplate | None
    adapter: RegisteredAdapter | None = None  # the base's adapter
    # Few threads, since they share the cores with the event loop.
    _threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(_THREADS, "text"))

    @staticmethod
    def from_card(card: worker_pb2.ModelCard) -> ServedModel:
        """Parse tokenizer and template (can take a second); raises :class:`ModelCardError`."""
        try:
            tokenizer = Tokenizer.from_buffer(card.tokenizer_json)
            # A tokenizer file may contain truncation and padding from training, which must not change prompts.
            tokenizer.no_truncation()
            tokenizer.no_padding()
            template = ChatTemplate(card.chat_template, card.special_tokens) if card.chat_template else None
            return ServedModel(card, tokenizer, Vocabulary(tokenizer), template)
        except Exception as error:  # the tokenizers library raises a bare Exception
            raise ModelCardError(f"model {card.model}: {error}") from error

    def adapted(self, adapter: RegisteredAdapter) -> ServedModel:
        """This model with an adapter: a model with a name of its own, whose KV and answers are not the base's."""
        card = worker_pb2.ModelCard()
        card.CopyFrom(self.card)
        card.model, card.hash_root = adapter.name, adapted_root(card.hash_root, adapter.digest)
        return ServedModel(card, self.tokenizer, self.vocabulary, self.template, adapter, self._threads)

    @cached_property
    def pool(self) -> str:
        """The name under which routers know the workers that serve the model."""
        return self.adapter.base if self.adapter else self.name

    @cached_property
    def name(self) -> str:
        """The name in requests."""
        return self.card.model

    @cached_property
    def max_len(self) -> int:
        """The most tokens of prompt and output together."""
        return self.card.max_model_len

    @property
    def resume(self) -> str:
        """Whether an interrupted text continues with the same tokens: exact or approximate."""
        return self.card.resume or "exact"

    @property
    def classifies(self) -> bool:
        """Whether it gives numbers for labels instead of embeddings."""
        return self.card.HasField("classes")

    @cached_property
    def sampling_defaults(self) -> dict[str, float]:
        """The publisher's recommended sampling parameters, by field."""
        given = self.card.sampling_defaults.ListFields()
        return {field.name: as_written(value) if isinstance(value, float) else value for field, value in given}

    @cached_property
    def _bos_text(self) -> str:
        return self.card.special_tokens.get("bos_token", "")

    @cached_property
    def _bos_id(self) -> int | None:
        return self.tokenizer.token_to_id(self._bos_text) if self._bos_text else None

    @cached_property
    def control_tokens(self) -> ControlTokens:
        """The control tokens, which clients' texts must not produce."""
        return ControlTokens(self.tokenizer)

    @cached_property
    def _longest_token(self) -> int:
        """The bytes of the longest token in the vocabulary's spelling, which is never shorter than its text."""
        return max((len(token.encode()) for token in self.tokenizer.get_vocab()), default=1)

    @cached_property
    def _plain(self) -> Tokenizer:
        """A copy of the tokenizer that reads control tokens as ordinary characters."""
        plain = Tokenizer.from_str(self.tokenizer.to_str())
        plain.encode_special_tokens = True
        return plain

    def check_length(self, size: int, param: str) -> None:
        """Refuse a text whose `size` in characters cannot fit the context; raises :class:`ApiError` (400)."""
        if size > self.max_len * self._longest_token:
            raise too_long(self.max_len, -(-size // self._longest_token), 0, param, at_least=True)

    async def off_loop(self, size: int, call: Callable[[], T], limit: int = _INLINE_CHARS) -> T:
        """Run a call, on another thread if the work is large."""
        if size <= limit:
            return call()
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    async def encode(self, text: str, param: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text; long texts are tokenized off the event loop.

        Raises :class:`ApiError` (400) for a text far beyond the context, before the whole text is tokenized.
        """
        self.check_length(len(text), param)
        return await self.off_loop(len(text), lambda: self.encode_now(text, param, add_special_tokens))

    def encode_now(self, text: str, param: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text, on the calling thread."""
        self._probe(text, param)
        ids = _ids(self.tokenizer, text, add_special_tokens=add_special_tokens)
        return self._with_bos(ids, text) if add_special_tokens else ids

    def _with_bos(self, ids: list[int], text: str) -> list[int]:
        """Make ids begin with one BOS token, if the model uses BOS."""
        bos = self._bos_id
        if bos is None:
            return ids
        # Some tokenizer files have the BOS token in the configuration, not in the post-processor.
        if self.card.add_bos_token and ids[:1] != [bos]:
            return [bos, *ids]
        # A text that begins with the spelling of BOS must not get a second one.
        return ids[1:] if ids[:2] == [bos, bos] and text.startswith(self._bos_text) else ids

    async def encode_start(self, text: str, limit: int) -> list[int]:
        """At most the first `limit` tokens of a text, including BOS and EOS; off the event loop if the text is long."""
        return await self.off_loop(len(text), lambda: self._encode_start(text, limit))

    async def encode_pair(
        self, first: str, second: str, limit: int | None, second_limit: int | None
    ) -> tuple[list[int], int]:
        """Token ids of two texts as the tokenizer joins them, and the second one's start if the model needs it.

        `limit` of all tokens and `second_limit` of the second text's cut the end of the second text.
        """
        return await self.off_loop(
            len(first) + len(second), lambda: self._encode_pair(first, second, limit, second_limit)
        )

    def _encode_pair(
        self, first: str, second: str, limit: int | None, second_limit: int | None
    ) -> tuple[list[int], int]:
        tokenizer = self.tokenizer
        self._probe(first, "text")
        one, two = (tokenizer.encode(text, add_special_tokens=False) for text in (first, second))
        if limit is not None:
            room = limit - len(one) - tokenizer.num_special_tokens_to_add(is_pair=True)
            two.truncate(max(0, min(len(two), room)))
        if second_limit is not None and second_limit < len(two):
            two.truncate(second_limit)
        joined = tokenizer.post_process(one, two)
        return joined.ids, next((index for index, kind in enumerate(joined.type_ids) if kind), 0)

    def _encode_start(self, text: str, limit: int) -> list[int]:
        tokenizer, around = self.tokenizer, self.tokenizer.num_special_tokens_to_add(is_pair=False)
        add_bos = self.card.add_bos_token and self._bos_id is not None
        room = max(0, limit - max(around, int(add_bos)))
        enough = _INLINE_CHARS + _CHARS_PER_TOKEN * limit
        start = tokenizer.encode(text[:enough], add_special_tokens=False)
        if len(start) <= room and len(text) > enough:
            start = tokenizer.encode(text[: max(enough, limit * self._longest_token)], add_special_tokens=False)
        start.truncate(room)
        return self._with_bos(tokenizer.post_process(start).ids, text)[:limit]

    def encode_parts(self, parts: Sequence[PromptPart], param: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a rendered conversation, on the calling thread."""
        for part in parts:
            self._probe(part.text, param)
        read = [(self._plain if part.literal else self.tokenizer, part.text) for part in parts]
        if not add_special_tokens:
            return [token_id for tokenizer, text in read for token_id in _ids(tokenizer, text)]
        encodings = [tokenizer.encode(text, add_special_tokens=False) for tokenizer, text in read]
        whole = self.tokenizer.post_process(Encoding.merge(encodings))
        return self._with_bos(whole.ids, "" if not parts or parts[0].literal else parts[0].text)

    def _probe(self, text: str, param: str) -> None:
        """Refuse a text whose beginning alone has twice the tokens that fit; the rest cannot reduce their number."""
        probed = _INLINE_CHARS + _CHARS_PER_TOKEN * self.max_len
        if len(text) > probed:
            tokens = len(self.tokenizer.encode(text[:probed], add_special_tokens=False).ids)
            if tokens > 2 * self.max_len:
                raise too_long(self.max_len, tokens, 0, param, at_least=True)

    def spellings(self, ids: Sequence[int]) -> list[str | None]:
        """The tokens in the vocabulary's spelling."""
        return [self.tokenizer.id_to_token(token_id) for token_id in ids]

    async def text_of(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ids; many are decoded off the event loop."""
        call = lambda: self.decode(ids, skip_special_tokens=skip_special_tokens)  # noqa: E731
        return await self.off_loop(len(ids), call, _INLINE_TOKENS)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ids, on the calling thread."""
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    @cached_property
    def _full_vocabulary(self) -> Vocabulary:
        return Vocabulary(self.tokenizer, skip_special_tokens=False)

    def new_detokenizer(self, *, after: Sequence[int] = (), skip_special_tokens: bool = True) -> Detokenizer:
        """See :meth:`Vocabulary.new_detokenizer`."""
        vocabulary = self.vocabulary if skip_special_tokens else self._full_vocabulary
        return vocabulary.new_detokenizer(after)

    def token_text(self, token_id: int) -> str:
        """A token's name in logprobs; ``bytes:\\xNN...`` for invalid UTF-8 (OpenAI's form)."""
        piece = self.vocabulary.token_bytes(token_id)
        try:
            return piece.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _ids(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = False) -> list[int]:
    """Token ids of a text. `encode` would also find each token's place in it, which takes a third of the time."""
    return tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
