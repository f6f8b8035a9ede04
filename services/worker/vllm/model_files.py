"""Reads what gateways need of a model folder, of any architecture: tokenizer, template, special tokens, identity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from services.compute.model.files import end_tokens, identity, read_header, read_json, weight_files
from services.compute.model.loading.chat_template import read_chat_template
from services.compute.model.loading.sampling import SamplingDefaults, read_sampling
from services.compute.model.loading.tokenizer import read_tokenizer


@dataclass(frozen=True, slots=True)
class ServedFiles:
    """The contents of a model folder that concern gateways."""

    identity: str  # equal for equal models in any folder
    tokenizer_json: bytes
    chat_template: str
    special_tokens: Mapping[str, str]
    add_bos_token: bool
    eos_token_ids: tuple[int, ...]
    sampling: SamplingDefaults


def read_served_files(folder: Path, vocab_size: int) -> ServedFiles:
    """Read a Hugging Face folder. Raises ModelError naming the file that is missing or unusable."""
    config_file, generation_file = folder / "config.json", folder / "generation_config.json"
    config, generation = read_json(config_file), read_json(generation_file)
    weights = weight_files(folder).files
    for file in weights:
        read_header(file)
    tokenizer_config = read_json(folder / "tokenizer_config.json")
    tokenizer = read_tokenizer(folder, tokenizer_config, vocab_size)
    own = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    text_config = config.get("text_config") or config
    ends = (*end_tokens(generation_file, generation), *end_tokens(config_file, text_config), *own)
    return ServedFiles(
        identity=identity(config_file.read_bytes(), weights),
        tokenizer_json=tokenizer.json,
        chat_template=read_chat_template(folder, tokenizer_config),
        special_tokens=tokenizer.special_tokens,
        add_bos_token=tokenizer.add_bos_token,
        eos_token_ids=tuple(dict.fromkeys(end for end in ends if 0 <= end < vocab_size)),
        sampling=read_sampling(generation_file, generation),
    )
