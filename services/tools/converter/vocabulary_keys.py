"""The metadata of GGUF that hold a tokenizer, from the files of a model folder."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from services.compute.model.formats.gguf.hub_files import hub_files
from services.compute.model.formats.gguf.metadata import GgufMetadata, Value
from services.compute.model.formats.gguf.pre_tokenizers import PRE_TOKENIZERS
from services.compute.model.formats.gguf.vocabulary import PREFIX, TokenType
from services.compute.model.spec import ModelError
from services.tools.converter.probe_texts import PROBES

# Splits that files name, those of the most models first: the first that gives the tokenizer's ids is the one.
_USUAL = ("qwen2", "llama-bpe", "dbrx", "gpt-2", "smollm", "tekken", "gpt-4o", "deepseek-v3", "falcon")
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_SPACE = "▁"
_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",
    "pad_token": "padding_token_id",
    "mask_token": "mask_token_id",
}


@dataclass(frozen=True, slots=True)
class FolderTokenizer:
    """A folder's files about its tokenizer."""

    path: Path
    tokenizer: Tokenizer
    special_tokens: Mapping[str, str]
    template: str
    eos_token_ids: tuple[int, ...]
    n_rows: int  # rows of the embedding


def vocabulary_keys(folder: FolderTokenizer) -> dict[str, Value]:
    """Return the metadata; their reader gives the ids of the folder's tokenizer. Raises ModelError."""
    model = json.loads(folder.tokenizer.to_str())["model"]
    if model["type"] != "BPE":
        raise ModelError(f"{folder.path}: a tokenizer of type {model['type']} is not written; allowed: BPE")
    keys = _common(folder, model)
    if any(token.startswith(_SPACE) for token in model["vocab"]):
        candidates = [keys | _sentence_piece(model, keys) | {f"{PREFIX}add_space_prefix": p} for p in (False, True)]
    else:
        merges = tuple(" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"])
        names = (*_USUAL, *(name for name in PRE_TOKENIZERS if name not in _USUAL))
        tried: dict[object, str] = {}
        for name in names:
            tried.setdefault(PRE_TOKENIZERS[name], name)
        byte_level = keys | {f"{PREFIX}model": "gpt2", f"{PREFIX}merges": merges}
        candidates = [byte_level | {f"{PREFIX}pre": name} for name in tried.values()]
    wanted = _ids(folder.tokenizer)
    for candidate in candidates:
        if _ids(hub_files(GgufMetadata(folder.path, candidate)).tokenizer) == wanted:
            return candidate
    raise ModelError(f"{folder.path}: no pre-tokenizer that GGUF names gives this tokenizer's ids")


def _ids(tokenizer: Tokenizer) -> list[list[int]]:
    return [tokenizer.encode(text).ids for text in PROBES]


def _common(folder: FolderTokenizer, model: dict[str, Any]) -> dict[str, Value]:
    """Tokens, types, special tokens, BOS and EOS, template."""
    tokenizer = folder.tokenizer
    added = tokenizer.get_added_tokens_decoder()
    texts = {token_id: text for text, token_id in tokenizer.get_vocab(with_added_tokens=True).items()}
    tokens = tuple(texts.get(index, f"[PAD{index}]") for index in range(folder.n_rows))
    types = [TokenType.NORMAL if index in texts else TokenType.UNUSED for index in range(folder.n_rows)]
    for token_id, token in added.items():
        types[token_id] = TokenType.CONTROL if token.special else TokenType.USER_DEFINED
    around = tokenizer.encode("").ids
    special = {name: tokenizer.token_to_id(text) for name, text in folder.special_tokens.items()}
    keys: dict[str, Value] = {
        f"{PREFIX}tokens": tokens,
        f"{PREFIX}token_type": tuple(int(kind) for kind in types),
        f"{PREFIX}add_bos_token": around[:1] == [special.get("bos_token")],
        f"{PREFIX}add_eos_token": len(around) > 0
        and around[-1] == special.get("eos_token") != special.get("bos_token"),
    }
    for name, key in _SPECIAL.items():
        if (named := special.get(name)) is not None:
            keys[f"{PREFIX}{key}"] = named
    others = [token_id for token_id in folder.eos_token_ids if token_id != special.get("eos_token")]
    if others:
        keys[f"{PREFIX}eot_token_id"] = others[0]
    if folder.template:
        keys["tokenizer.chat_template"] = folder.template
    return keys


def _sentence_piece(model: dict[str, Any], common: Mapping[str, Value]) -> dict[str, Value]:
    """Scores that order SentencePiece's merges like the list of merges."""
    tokens, types = list(common[f"{PREFIX}tokens"]), list(common[f"{PREFIX}token_type"])  # type: ignore[arg-type]
    rank: dict[str, int] = {}
    for left, right in (pair if isinstance(pair, list) else pair.split(" ", 1) for pair in model["merges"]):
        rank.setdefault(left + right, len(rank))
    scores = []
    for index, token in enumerate(tokens):
        scores.append(-float(rank.get(str(token), len(rank) + index)))
        if types[index] == TokenType.NORMAL and _BYTE.fullmatch(str(token)):
            types[index] = int(TokenType.BYTE)
        if token == model.get("unk_token"):
            types[index] = int(TokenType.UNKNOWN)
    return {f"{PREFIX}model": "llama", f"{PREFIX}scores": tuple(scores), f"{PREFIX}token_type": tuple(types)}
