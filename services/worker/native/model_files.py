"""Reads what gateways need of a model folder or GGUF file: tokenizer, chat template, special tokens, identity."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from services.common.lifecycle import StartupError
from services.compute.model.families.config import MAX_INTEGER
from services.compute.model.files import end_tokens, identity, read_header, read_json, weight_files
from services.compute.model.formats.gguf.hub_files import hub_files
from services.compute.model.formats.gguf.parts import files_of
from services.compute.model.loading.chat_template import chat_template_of, read_chat_template
from services.compute.model.loading.pooling import (
    EmbeddingFiles,
    Pooling,
    read_embedding_files,
    read_gguf_pooling,
    read_pooling,
)
from services.compute.model.loading.sampling import SamplingDefaults, read_sampling
from services.compute.model.loading.tokenizer import read_tokenizer, tokenizer_of
from services.compute.model.registry import describe, read_spec
from services.compute.model.spec import ModelError, ModelSpec

T = TypeVar("T")


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


def read_model_files(path: Path, *, weights: bool = True) -> ModelFiles:
    """Read a Hugging Face folder or a GGUF file; raises StartupError naming every file that is missing or unusable.

    `weights`: False if the folder's weights are not there.
    """
    try:
        return _read_gguf(path) if path.is_file() else _read(path, weights)
    except ModelError as error:
        raise StartupError(f"RYZANSTEIN_MODEL {'; '.join(find_problems(path, weights=weights))}") from error


def find_problems(path: Path, *, weights: bool = True) -> list[str]:
    """Return every reason why a folder or a GGUF file cannot be read; its tensors are not compared with its config."""
    problems: list[str] = []

    def attempt(read: Callable[[], T]) -> T | None:
        try:
            return read()
        except ModelError as error:
            problems.append(str(error))
            return None

    if path.is_file():
        attempt(lambda: _read_gguf(path))
        return problems
    spec = attempt(lambda: read_spec(path))
    for file in (attempt(lambda: weight_files(path).files) or ()) if weights else ():
        attempt(partial(read_header, file))
    settings = attempt(lambda: read_json(path / "tokenizer_config.json"))
    if settings is not None:
        attempt(lambda: read_tokenizer(path, settings, MAX_INTEGER if spec is None else spec.vocab_size))
        attempt(lambda: read_chat_template(path, settings))
    generation_file = path / "generation_config.json"
    generation = attempt(lambda: read_json(generation_file))
    if generation is not None:
        attempt(lambda: end_tokens(generation_file, generation))
        attempt(lambda: read_sampling(generation_file, generation))
    attempt(lambda: read_pooling(path) if spec is None else _pooling(path, spec))
    attempt(lambda: read_embedding_files(path))
    return problems


def _read(folder: Path, with_weights: bool) -> ModelFiles:
    spec = read_spec(folder)
    weights = weight_files(folder).files if with_weights else ()
    for file in weights:
        read_header(file)
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
