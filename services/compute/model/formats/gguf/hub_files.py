"""The small files of a hub repository, made from the metadata of a GGUF file: tokenizer, template, generation settings.

Free of torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from services.compute.model.formats.gguf.metadata import GgufMetadata
from services.compute.model.formats.gguf.tokenizer import build_tokenizer
from services.compute.model.formats.gguf.vocabulary import GgufVocabulary, read_vocabulary

_TEMPLATE = "tokenizer.chat_template"
_SAMPLING = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
_SHORT = 7  # digits that a 32-bit number has


@dataclass(frozen=True, slots=True)
class HubFiles:
    """The hub files of a model that gateways need, made from a GGUF file."""

    tokenizer: Tokenizer  # tokenizer.json
    tokenizer_config: dict[str, Any]
    generation_config: dict[str, Any]


def hub_files(metadata: GgufMetadata) -> HubFiles:
    """Make the files. Raises ModelError naming the file and the key that is missing, wrong or not implemented."""
    vocabulary = read_vocabulary(metadata)
    tokenizer = build_tokenizer(vocabulary)
    return HubFiles(tokenizer, _tokenizer_config(vocabulary, tokenizer), _generation_config(vocabulary))


def _tokenizer_config(vocabulary: GgufVocabulary, tokenizer: Tokenizer) -> dict[str, Any]:
    metadata = vocabulary.metadata
    special = {name: tokenizer.id_to_token(token_id) for name, token_id in vocabulary.special.items()}
    around = tokenizer.encode("").ids  # tokens around every text
    bos, eos = (vocabulary.special.get(name) for name in ("bos_token", "eos_token"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        "add_bos_token": bos is not None and around[:1] == [bos],
        "add_eos_token": eos is not None and around[-1:] == [eos] and around != [bos],
        "clean_up_tokenization_spaces": False,
    }
    length = f"{metadata.text('general.architecture', '')}.context_length"
    if length in metadata:
        config["model_max_length"] = metadata.integer(length)
    if template := _chat_template(metadata):
        config["chat_template"] = template
    return config


def _chat_template(metadata: GgufMetadata) -> str | list[dict[str, str]]:
    """The only template, or all with their names; "" if there is none."""
    default, names = metadata.text(_TEMPLATE, ""), metadata.texts(f"{_TEMPLATE}s")
    if not names:
        return default
    named = {"default": default} if default else {}
    named |= {name: metadata.text(f"{_TEMPLATE}.{name}") for name in names if name != "default"}
    return [{"name": name, "template": template} for name, template in named.items()]


def _generation_config(vocabulary: GgufVocabulary) -> dict[str, Any]:
    metadata, special = vocabulary.metadata, vocabulary.special
    config: dict[str, Any] = {f"{name}_id": special[name] for name in ("bos_token", "pad_token") if name in special}
    if vocabulary.ends:
        config["eos_token_id"] = list(vocabulary.ends)
    for name, key in _SAMPLING.items():
        if key in metadata:
            value = metadata.number(key)
            config[name] = int(value) if name == "top_k" else float(f"{value:.{_SHORT}g}")
    return config
