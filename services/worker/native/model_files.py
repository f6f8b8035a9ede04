"""Reads what gateways need of a model folder or GGUF file: tokenizer, chat template, special tokens, identity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from services.common.lifecycle import StartupError
from services.worker.model.files import check_safetensors, end_tokens, identity, read_json, weight_files
from services.worker.model.formats.gguf.hub_files import hub_files
from services.worker.model.formats.gguf.parts import files_of
from services.worker.model.loading.chat_template import chat_template_of, read_chat_template
from services.worker.model.loading.pooling import (
    EmbeddingFiles,
    Pooling,
    read_embedding_files,
    read_gguf_pooling,
    read_pooling,
)
from services.worker.model.loading.sampling import SamplingDefaults, read_sampling
from services.worker.model.loading.tokenizer import read_tokenizer, tokenizer_of
from services.worker.model.registry import describe, read_spec
from services.worker.model.spec import ModelError, ModelSpec


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The contents of a model folder except the weights."""

    identity: str  # equal for equal models in any folder
    spec: ModelSpec
    architecture: str
    pooling: Pooling
    embedding: EmbeddingFiles
    tokenizer_json: bytes
    chat_template: str
    special_tokens: dict[str, str]
    add_bos_token: bool
    eos_token_ids: tuple[int, ...]
    sampling: SamplingDefaults


def read_model_files(path: Path) -> ModelFiles:
    """Read a Hugging Face folder or a GGUF file; raises StartupError naming the file that is missing or unusable."""
    try:
        return _read_gguf(path) if path.is_file() else _read(path)
    except ModelError as error:
        raise StartupError(f"RYZANSTEIN_MODEL {error}") from error


def _read(folder: Path) -> ModelFiles:
    spec = read_spec(folder)
    weights = weight_files(folder).files
    for file in weights:
        check_safetensors(file)
    generation_file = folder / "generation_config.json"
    config, generation = read_json(folder / "config.json"), read_json(generation_file)
    tokenizer_config = read_json(folder / "tokenizer_config.json")
    tokenizer = read_tokenizer(folder, tokenizer_config, spec.vocab_size)
    own = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    ends = (*end_tokens(generation_file, generation), *spec.eos_token_ids, *own)
    return ModelFiles(
        identity=identity((folder / "config.json").read_bytes(), weights),
        spec=spec,
        architecture=", ".join(config.get("architectures") or [spec.family]),
        pooling=_pooling(folder, spec),
        embedding=read_embedding_files(folder),
        tokenizer_json=tokenizer.json,
        chat_template=read_chat_template(folder, tokenizer_config),
        special_tokens=tokenizer.special_tokens,
        add_bos_token=tokenizer.add_bos_token,
        # Each source may have its own end tokens: a chat ends with the tokenizer's, a text with the model's.
        eos_token_ids=_existing(ends, spec),
        sampling=read_sampling(generation_file, generation),
    )


def _read_gguf(file: Path) -> ModelFiles:
    found = describe(file)
    assert found.gguf is not None
    metadata, spec = found.gguf.metadata, found.spec
    hub = hub_files(metadata)
    tokenizer = tokenizer_of(hub)
    beside = file.with_name("generation_config.json")  # outweighs what the file itself recommends
    return ModelFiles(
        identity=identity(b"", files_of(file)),
        spec=spec,
        architecture=found.family.architecture,
        pooling=read_gguf_pooling(metadata),
        embedding=EmbeddingFiles(),
        tokenizer_json=tokenizer.json,
        chat_template=chat_template_of(file, hub.tokenizer_config),
        special_tokens=tokenizer.special_tokens,
        add_bos_token=tokenizer.add_bos_token,
        eos_token_ids=_existing((*end_tokens(file, hub.generation_config), *spec.eos_token_ids), spec),
        sampling=read_sampling(beside if beside.is_file() else file, hub.generation_config | read_json(beside)),
    )


def _pooling(folder: Path, spec: ModelSpec) -> Pooling:
    """Return how the checkpoint pools: a classifier as its architecture says."""
    return read_pooling(folder) if spec.classifier is None else Pooling(spec.classifier.pooling, normalise=False)


def _existing(ends: Sequence[int], spec: ModelSpec) -> tuple[int, ...]:
    """Return the ids of tokens that the model has, each once."""
    return tuple(dict.fromkeys(end for end in ends if 0 <= end < spec.vocab_size))
