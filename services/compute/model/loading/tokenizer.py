"""Reads a checkpoint's tokenizer and completes it from the files next to tokenizer.json, as `transformers` does."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from services.compute.model.files import read_json, refuse_pointer
from services.compute.model.formats.gguf.hub_files import HubFiles
from services.compute.model.loading.sentencepiece import read_sentencepiece
from services.compute.model.spec import ModelError

log = logging.getLogger(__name__)

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTS = ("additional_special_tokens", "extra_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The tokenizer and special tokens for gateways."""

    json: bytes  # a file of the tokenizers library
    special_tokens: dict[str, str]  # bos_token, eos_token, ... as text
    eos_token_id: int | None
    add_bos_token: bool


def read_tokenizer(folder: Path, config: dict[str, Any], vocab_size: int) -> TokenizerFiles:
    """Read the tokenizer of `folder`, whose tokenizer_config.json is `config`. Raises ModelError naming the file."""
    text, implied = _whole(folder, config)
    tokenizer = Tokenizer.from_buffer(text)
    settings = implied | _merged(config, read_json(folder / "special_tokens_map.json"))
    special = _special_tokens(settings)
    before = len(tokenizer.get_added_tokens_decoder())
    _add_listed(tokenizer, folder, config, set(special.values()), vocab_size)
    standard = [_special(settings[name]) for name in _NAMED if _text(settings.get(name))]
    _add_unknown(tokenizer, [*standard, *_listed_special(folder, settings)], vocab_size)
    if len(tokenizer.get_added_tokens_decoder()) != before:
        text = tokenizer.to_str().encode()
    eos = special.get("eos_token")
    return TokenizerFiles(
        json=text,
        special_tokens=special,
        eos_token_id=None if eos is None else tokenizer.token_to_id(eos),
        add_bos_token=bool(config.get("add_bos_token", False)),
    )


def tokenizer_of(files: HubFiles) -> TokenizerFiles:
    """Return the tokenizer that a GGUF file holds."""
    special = _special_tokens(files.tokenizer_config)
    eos = special.get("eos_token")
    return TokenizerFiles(
        json=files.tokenizer.to_str().encode(),
        special_tokens=special,
        eos_token_id=None if eos is None else files.tokenizer.token_to_id(eos),
        add_bos_token=files.tokenizer_config["add_bos_token"],
    )


def _whole(folder: Path, config: dict[str, Any]) -> tuple[bytes, dict[str, str]]:
    """A file of the tokenizers library, and the special tokens of a file converted from another format."""
    file, older = folder / "tokenizer.json", folder / "tokenizer.model"
    if not file.is_file() and older.is_file():
        legacy, bos = config.get("legacy") is not False, config.get("add_bos_token") is not False
        made, special = read_sentencepiece(older, legacy=legacy, add_bos=bos, add_eos=bool(config.get("add_eos_token")))
        return made.to_str().encode(), special
    if not file.is_file():
        raise ModelError(f"{file}: missing: gateways need the tokenizers file of the model{_other_formats(folder)}")
    refuse_pointer(file)
    text = file.read_bytes()
    try:
        Tokenizer.from_buffer(text)
    except Exception as error:  # the tokenizers library raises bare Exception
        raise ModelError(f"{file}: not a tokenizer: {error}") from error
    return text, {}


def _other_formats(folder: Path) -> str:
    others = [name for name in ("tekken.json", "vocab.json", "vocab.txt") if (folder / name).is_file()]
    return f" ({others[0]} alone has to be converted, see docs/serving.md)" if others else ""


def _merged(config: dict[str, Any], special_map: dict[str, Any]) -> dict[str, Any]:
    """Merge special_tokens_map.json of older checkpoints into the config; newer ones use tokenizer_config.json."""
    newer = "added_tokens_decoder" in config
    given = {key: value for key, value in config.items() if value is not None}
    return {**special_map, **given} if newer else {**given, **special_map}


def _text(token: Any) -> str:
    """The text of a token, which is a string or an object with its content."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """Return the standard special tokens and the model's own, for its template."""
    named = {key: value for key, value in settings.items() if key in _NAMED or _is_named(key, value)}
    extra = settings.get("extra_special_tokens")
    named |= extra if isinstance(extra, dict) else {}
    return {key: _text(value) for key, value in named.items() if _text(value)}


def _is_named(key: str, value: Any) -> bool:
    return key.endswith("_token") and (isinstance(value, str) or (isinstance(value, dict) and "content" in value))


def _listed_special(folder: Path, settings: dict[str, Any]) -> list[AddedToken]:
    listed: list[Any] = []
    for name in _LISTS:
        value = settings.get(name) or []
        if not isinstance(value, dict | list):
            raise ModelError(f"{folder}: its tokenizer's {name}: expected a list of tokens, found {value!r}")
        listed += value.values() if isinstance(value, dict) else value
    return [_special(token) for token in listed if _text(token)]


def _special(token: Any) -> AddedToken:
    flags = {flag: bool(token[flag]) for flag in _FLAGS if flag in token} if isinstance(token, dict) else {}
    return AddedToken(_text(token), special=True, **{"normalized": False, **flags})


def _add_listed(tokenizer: Tokenizer, folder: Path, config: dict[str, Any], special: set[str], vocab_size: int) -> None:
    """Add the tokens of added_tokens_decoder, or of older checkpoints' added_tokens.json, under their ids."""
    listed: dict[int, AddedToken] = {}
    decoder, file = config.get("added_tokens_decoder"), folder / "tokenizer_config.json"
    if isinstance(decoder, dict):
        for key, token in decoder.items():
            if not isinstance(token, dict):
                raise ModelError(f"{file}: added_tokens_decoder[{key!r}]: expected an object, found {token!r}")
            flags = {flag: bool(token[flag]) for flag in (*_FLAGS, "special") if flag in token}
            listed[_token_id(file, _text(token), key)] = AddedToken(_text(token), **flags)
    else:
        file = folder / "added_tokens.json"
        for text, token_id in read_json(file).items():
            listed[_token_id(file, text, token_id)] = AddedToken(
                text, special=text in special, normalized=text not in special
            )
    known = {added.content for added in tokenizer.get_added_tokens_decoder().values()}
    for token_id, token in sorted(listed.items()):
        if token.content in known:
            continue
        if token_id >= vocab_size:
            log.warning("%s: the model has no embedding for %r (%d)", file, token.content, token_id)
            continue
        _add(tokenizer, token)
        known_id = tokenizer.token_to_id(token.content)
        if known_id != token_id:
            raise ModelError(f"{file}: {token.content!r} would be token {known_id} instead of {token_id}")


def _token_id(file: Path, text: str, value: str | int) -> int:
    if not str(value).isdecimal():
        raise ModelError(f"{file}: the id of {text!r} must be a number, found {value!r}")
    return int(value)


def _add_unknown(tokenizer: Tokenizer, tokens: Iterable[AddedToken], vocab_size: int) -> None:
    """Mark ordinary tokens of these names as special, and add new tokens that have an embedding."""
    known = {added.content for added in tokenizer.get_added_tokens_decoder().values()}
    for token in tokens:
        if token.content in known:
            continue
        if tokenizer.token_to_id(token.content) is not None or tokenizer.get_vocab_size() < vocab_size:
            _add(tokenizer, token)


def _add(tokenizer: Tokenizer, token: AddedToken) -> None:
    if token.special:
        tokenizer.add_special_tokens([token])
    else:
        tokenizer.add_tokens([token])
