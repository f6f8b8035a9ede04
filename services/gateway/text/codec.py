"""A model's tokenizer and chat template, made from its card."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from ryzanstein.v1 import worker_pb2
from tokenizers import Encoding, Tokenizer

from services.common.floats import as_written
from services.gateway.errors import too_long
from services.gateway.text.detokenizer import Detokenizer, Vocabulary
from services.gateway.text.guard import ControlTokens, PromptPart
from services.gateway.text.template import ChatTemplate

# Below this a tokenizer call is shorter (< 1 ms) than what handing it to a thread and back is worth.
_INLINE_CHARS = 4_000
_INLINE_TOKENS = 2_000
_CHARS_PER_TOKEN = 8  # more than any language needs: a longer text is probed before it is tokenized
_THREADS = 2

T = TypeVar("T")


class ModelCardError(Exception):
    """A worker's model card cannot be used; the message names the model and the reason."""


@dataclass(frozen=True)
class ServedModel:
    """Everything the gateway knows of one model."""

    card: worker_pb2.ModelCard
    tokenizer: Tokenizer
    vocabulary: Vocabulary
    template: ChatTemplate | None
    # Few: texts that are tokenized at the same time share the cores with the event loop.
    _threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(_THREADS, "text"))

    @staticmethod
    def from_card(card: worker_pb2.ModelCard) -> ServedModel:
        """Parse tokenizer and template (can take a second); raises :class:`ModelCardError`."""
        try:
            tokenizer = Tokenizer.from_buffer(card.tokenizer_json)
            template = ChatTemplate(card.chat_template, card.special_tokens) if card.chat_template else None
        except Exception as error:  # the tokenizers library raises bare Exception
            raise ModelCardError(f"model {card.model}: {error}") from error
        # A tokenizer file may carry training-time settings; serving must neither cut nor pad prompts.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return ServedModel(card, tokenizer, Vocabulary(tokenizer), template)

    @cached_property
    def name(self) -> str:
        """The name clients use."""
        return self.card.model

    @cached_property
    def max_len(self) -> int:
        """Most tokens of prompt and output together."""
        return self.card.max_model_len

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end a sequence."""
        return frozenset(self.card.eos_token_ids)

    @cached_property
    def sampling_defaults(self) -> dict[str, float]:
        """What its publisher recommends, by field."""
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
        """What clients may not spell."""
        return ControlTokens(self.tokenizer)

    @cached_property
    def _longest_token(self) -> int:
        """Bytes of the longest token; as spelled in the vocabulary, which is never shorter than what it stands for."""
        return max((len(token.encode()) for token in self.tokenizer.get_vocab()), default=1)

    @cached_property
    def _plain(self) -> Tokenizer:
        """The tokenizer, reading control tokens as ordinary characters."""
        plain = Tokenizer.from_str(self.tokenizer.to_str())
        plain.encode_special_tokens = True
        return plain

    def check_length(self, size: int, param: str) -> None:
        """Refuse a text of `size` characters that cannot fit, whatever it says; raises :class:`ApiError` (400)."""
        if size > self.max_len * self._longest_token:
            raise too_long(self.max_len, -(-size // self._longest_token), 0, param, at_least=True)

    async def off_loop(self, size: int, call: Callable[[], T], limit: int = _INLINE_CHARS) -> T:
        """Call, on another thread if the work is large."""
        if size <= limit:
            return call()
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    async def encode(self, text: str, param: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text; long ones are tokenized off the event loop.

        Raises :class:`ApiError` (400) for texts far beyond the context, before all of them is tokenized.
        """
        self.check_length(len(text), param)
        return await self.off_loop(len(text), lambda: self.encode_now(text, param, add_special_tokens))

    def encode_now(self, text: str, param: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text, on the calling thread."""
        self._probe(text, param)
        ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return self._with_bos(ids, text) if add_special_tokens else ids

    def _with_bos(self, ids: list[int], text: str) -> list[int]:
        """Ids of a text that begin with one BOS token, if the model wants any."""
        bos = self._bos_id
        if bos is None:
            return ids
        # Some tokenizer files leave the BOS token to the configuration instead of their post-processor.
        if self.card.add_bos_token and ids[:1] != [bos]:
            return [bos, *ids]
        # A text that begins with the token's own spelling has it already.
        return ids[1:] if ids[:2] == [bos, bos] and text.startswith(self._bos_text) else ids

    async def encode_start(self, text: str, limit: int) -> list[int]:
        """At most the first `limit` tokens of a text, those around it included; off the event loop if it is long."""
        return await self.off_loop(len(text), lambda: self._encode_start(text, limit))

    def _encode_start(self, text: str, limit: int) -> list[int]:
        tokenizer, around = self.tokenizer, self.tokenizer.num_special_tokens_to_add(is_pair=False)
        add_bos = self.card.add_bos_token and self._bos_id is not None
        kept = max(0, limit - max(around, int(add_bos)))
        enough = _INLINE_CHARS + _CHARS_PER_TOKEN * limit
        start = tokenizer.encode(text[:enough], add_special_tokens=False)
        if len(start) <= kept and len(text) > enough:
            start = tokenizer.encode(text[: limit * self._longest_token], add_special_tokens=False)
        start.truncate(kept)
        return self._with_bos(tokenizer.post_process(start).ids, text)[:limit]

    def encode_parts(self, parts: Sequence[PromptPart], param: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a rendered conversation, on the calling thread."""
        encodings = []
        for part in parts:
            self._probe(part.text, param)
            tokenizer = self._plain if part.literal else self.tokenizer
            encodings.append(tokenizer.encode(part.text, add_special_tokens=False))
        if not add_special_tokens:
            ids: list[int] = []
            for encoding in encodings:
                ids += encoding.ids
            return ids
        whole = self.tokenizer.post_process(Encoding.merge(encodings))
        return self._with_bos(whole.ids, "" if not parts or parts[0].literal else parts[0].text)

    def _probe(self, text: str, param: str) -> None:
        """Refuse a text whose beginning alone has twice the tokens that fit: the rest cannot take them back."""
        probed = _INLINE_CHARS + _CHARS_PER_TOKEN * self.max_len
        if len(text) > probed:
            tokens = len(self.tokenizer.encode(text[:probed], add_special_tokens=False).ids)
            if tokens > 2 * self.max_len:
                raise too_long(self.max_len, tokens, 0, param, at_least=True)

    def spellings(self, ids: Sequence[int]) -> list[str | None]:
        """Tokens as the vocabulary spells them."""
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
        """A token as it is named in logprobs; one that is not whole UTF-8 as ``bytes:\\xNN...`` (OpenAI's form)."""
        piece = self.vocabulary.token_bytes(token_id)
        try:
            return piece.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
