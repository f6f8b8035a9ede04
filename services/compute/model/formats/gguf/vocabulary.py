"""The vocabulary of a GGUF file: tokens with their types, and the rules of special tokens. Free of torch."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from services.compute.model.formats.gguf.metadata import GgufMetadata
from services.compute.model.spec import ModelError

log = logging.getLogger(__name__)

PREFIX = "tokenizer.ggml."


class TokenType(IntEnum):
    """Types of tokens in `tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# The keys of special tokens by their names in tokenizer_config.json.
_IDS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # spelled like this in the format
    "pad_token": "padding_token_id",
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}
_DEFAULTS = {  # ids that files of these tokenizers leave out
    "llama": {"bos_token": 1, "eos_token": 2, "unk_token": 0},
    "bert": {"bos_token": 101, "unk_token": 100, "sep_token": 102, "pad_token": 0, "mask_token": 103},
}
_NEEDED = ("bos_token", "eos_token")
_ENDS = ("eot_token_id", "eom_token_id")  # further ends besides EOS

# Files often name one end token and mean several: a turn ends with another token than a text. These spellings are end
# tokens also in llama.cpp. Tokens of fill-in-the-middle prompts are, because another file follows them.
_SPELLINGS = (
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|> "
    "<EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> "
    "<｜end▁of▁sentence｜> [e~[ "
    "<|fim_pad|> <fim-pad> <fim_pad> <PAD> <|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> <|file_sep|>"
)
_END_TEXTS = frozenset(_SPELLINGS.split())
_MARKUP = "</s>"  # also the end of struck-out text, which Gemma has as an ordinary token
_HARMONY = ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"})  # with these, <|end|> ends a message, not a turn


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """The tokens of a file; lists are by token id."""

    metadata: GgufMetadata
    model: str  # the tokenizer's model: "gpt2", "llama", ...
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    scores: tuple[float, ...]  # empty if the file has none
    ids: Mapping[str, int]  # by text
    special: Mapping[str, int]  # named special tokens of the file, by their names in tokenizer_config.json
    ends: tuple[int, ...]  # every token that ends an answer; the file's own EOS first

    def of_type(self, *types: TokenType) -> list[int]:
        """Return the ids of the tokens of these types; end tokens are control tokens whatever their type."""
        ends = set(self.ends)
        return [
            token_id
            for token_id, kind in enumerate(self.types)
            if (TokenType.CONTROL if token_id in ends else kind) in types
        ]

    def adds(self, name: str, default: bool) -> str | None:
        """Return the text of `bos_token` or `eos_token` if texts begin or end with it. Raises ModelError."""
        key = f"{PREFIX}add_{name}"
        if not self.metadata.flag(key, default):
            return None
        if name not in self.special:
            raise self.metadata.error(key, f"true, but {PREFIX}{_IDS[name]} is missing")
        return self.tokens[self.special[name]]


def read_vocabulary(metadata: GgufMetadata) -> GgufVocabulary:
    """Read the vocabulary of a file. Raises ModelError naming the file and the key."""
    key = f"{PREFIX}tokens"
    tokens = tuple(text or f"[EMPTY_{index}]" for index, text in enumerate(metadata.texts(key)))
    if not tokens:
        raise metadata.error(key, "missing or empty: the file holds no tokenizer; take one that does")
    ids = {text: index for index, text in enumerate(tokens)}
    if len(ids) != len(tokens):
        twice = next(text for index, text in enumerate(tokens) if ids[text] != index)
        raise metadata.error(key, f"{twice!r} is in the list twice")
    types = metadata.integers(f"{PREFIX}token_type") or (int(TokenType.NORMAL),) * len(tokens)
    scores = metadata.numbers(f"{PREFIX}scores")
    for name, values in (("token_type", types), ("scores", scores)):
        if values and len(values) != len(tokens):
            raise metadata.error(f"{PREFIX}{name}", f"{len(values)} values for {len(tokens)} tokens")
    model = metadata.text(f"{PREFIX}model")
    special = _special(metadata, model, len(tokens))
    return GgufVocabulary(
        metadata=metadata,
        model=model,
        tokens=tokens,
        types=types,
        scores=scores,
        ids=ids,
        special=special,
        ends=_ends(metadata, ids, types, special.get("eos_token")),
    )


def _special(metadata: GgufMetadata, model: str, n_tokens: int) -> dict[str, int]:
    """The named special tokens of a file, and those that files of its tokenizer leave out. Raises ModelError."""
    special = {name: index for name, index in _DEFAULTS.get(model, {}).items() if index < n_tokens}
    for name, key in _IDS.items():
        try:
            token_id = _token_id(metadata, key, n_tokens)
        except ModelError as error:
            if name in _NEEDED:
                raise
            log.warning("%s; the file has no %s then", error, name)
            continue
        if token_id is not None:
            special[name] = token_id
    return special


def _token_id(metadata: GgufMetadata, name: str, n_tokens: int) -> int | None:
    key = PREFIX + name
    if key not in metadata:
        return None
    token_id = metadata.integer(key)
    if not 0 <= token_id < n_tokens:
        raise metadata.error(key, f"{token_id} is no token; the vocabulary has {n_tokens}")
    return token_id


def _ends(metadata: GgufMetadata, ids: Mapping[str, int], types: tuple[int, ...], eos: int | None) -> tuple[int, ...]:
    known = _END_TEXTS & ids.keys()
    if any(both <= known for both in _HARMONY):
        known -= {"<|end|>"}
    if _MARKUP in known and types[ids[_MARKUP]] != TokenType.CONTROL:
        known -= {_MARKUP}
    named = [eos, *(_token_id(metadata, name, len(ids)) for name in _ENDS)]
    return tuple(dict.fromkeys([end for end in named if end is not None] + sorted(ids[text] for text in known)))
