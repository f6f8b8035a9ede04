"""A model's tokenizer and chat template, made from its card."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ryzanstein.v1 import worker_pb2
from tokenizers import Tokenizer

from services.gateway.text.detokenizer import Detokenizer, Vocabulary
from services.gateway.text.template import ChatTemplate

# Below this a tokenizer call is shorter (< 1 ms) than what handing it to a thread and back is worth.
_INLINE_CHARS = 4_000


class ModelCardError(Exception):
    """A worker's model card cannot be used; the message names the model and the reason."""


@dataclass(frozen=True)
class ServedModel:
    """Everything the gateway knows of one model."""

    card: worker_pb2.ModelCard
    tokenizer: Tokenizer
    vocabulary: Vocabulary
    template: ChatTemplate | None

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

    @property
    def name(self) -> str:
        """The name clients use."""
        return self.card.model

    @property
    def max_len(self) -> int:
        """Most tokens of prompt and output together."""
        return self.card.max_model_len

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end a sequence."""
        return frozenset(self.card.eos_token_ids)

    @cached_property
    def _bos_id(self) -> int | None:
        text = self.card.special_tokens.get("bos_token", "")
        return self.tokenizer.token_to_id(text) if self.card.add_bos_token and text else None

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text; long texts are tokenized off the event loop."""
        if len(text) <= _INLINE_CHARS:
            return self.encode_now(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self.encode_now, text, add_special_tokens=add_special_tokens)

    def encode_now(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text, on the calling thread."""
        ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        # Some tokenizer files leave the BOS token to the configuration instead of their post-processor.
        if add_special_tokens and self._bos_id is not None and ids[:1] != [self._bos_id]:
            ids = [self._bos_id, *ids]
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ids."""
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    @cached_property
    def _full_vocabulary(self) -> Vocabulary:
        return Vocabulary(self.tokenizer, skip_special_tokens=False)

    def new_detokenizer(self, *, continues: bool, skip_special_tokens: bool = True) -> Detokenizer:
        """See :meth:`Vocabulary.new_detokenizer`."""
        vocabulary = self.vocabulary if skip_special_tokens else self._full_vocabulary
        return vocabulary.new_detokenizer(continues=continues)

    def token_text(self, token_id: int) -> str:
        """A token as it is named in logprobs; one that is not whole UTF-8 as ``bytes:\\xNN...`` (OpenAI's form)."""
        piece = self.vocabulary.token_bytes(token_id)
        try:
            return piece.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
