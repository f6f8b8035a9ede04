"""What gateways need from a model folder: tokenizer, chat template, special tokens, identity."""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from services.common.lifecycle import StartupError

_SAMPLE_BYTES = 64 * 1024
_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The contents of a model folder that are not weights."""

    identity: str  # equal for equal models, wherever they are stored
    architecture: str
    tokenizer_json: bytes
    chat_template: str
    special_tokens: dict[str, str]
    add_bos_token: bool
    eos_token_ids: tuple[int, ...]


def read_model_files(folder: Path) -> ModelFiles:
    """Read a Hugging Face model folder; raises StartupError naming the file that is missing or malformed."""
    config = _read_json(folder / "config.json", required=True)
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.is_file():
        raise StartupError(f"{tokenizer} does not exist: gateways need the tokenizers file of the model")
    tokenizer_config = _read_json(folder / "tokenizer_config.json")
    generation = _read_json(folder / "generation_config.json")
    eos = generation.get("eos_token_id")
    return ModelFiles(
        identity=_identity(folder),
        architecture=", ".join(config.get("architectures") or [str(config.get("model_type", ""))]),
        tokenizer_json=tokenizer.read_bytes(),
        chat_template=_chat_template(folder, tokenizer_config),
        special_tokens=_special_tokens(tokenizer_config),
        add_bos_token=bool(tokenizer_config.get("add_bos_token", False)),
        eos_token_ids=_as_ids(eos if eos is not None else config.get("eos_token_id")),
    )


def _read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    if not path.is_file():
        if required:
            raise StartupError(f"{path} does not exist")
        return {}
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise StartupError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise StartupError(f"{path} is not a JSON object")
    return value


def _chat_template(folder: Path, tokenizer_config: dict[str, Any]) -> str:
    """Newer repositories keep the template in a file of its own, older ones inside tokenizer_config.json."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text()
    template = tokenizer_config.get("chat_template") or ""
    if isinstance(template, list):  # named templates
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default", "")
    return str(template)


def _special_tokens(tokenizer_config: dict[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in _SPECIAL_TOKENS:
        value = tokenizer_config.get(name)
        if isinstance(value, dict):  # a serialized AddedToken
            value = value.get("content")
        if value:
            tokens[name] = str(value)
    return tokens


def _as_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def _identity(folder: Path) -> str:
    """A digest of the configuration and of samples of the weights: reading all of them would take too long."""
    digest = sha256((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"\0{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            for offset in (0, size // 3, size * 2 // 3, max(0, size - _SAMPLE_BYTES)):
                stream.seek(offset)
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]
