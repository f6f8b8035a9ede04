"""A model's folder or GGUF file, except its weights, as one value. Free of torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Self, TypeVar

from services.compute.model.families.config import MAX_INTEGER, Config
from services.compute.model.files import (
    FileStates,
    end_tokens,
    file_states,
    identity,
    read_header,
    read_json,
    weight_files,
)
from services.compute.model.formats.gguf.hub_files import HubFiles, hub_files
from services.compute.model.formats.gguf.parts import files_of
from services.compute.model.loading.chat_template import chat_template_of, read_chat_template
from services.compute.model.loading.images import ImageProcessing, read_image_processing
from services.compute.model.loading.pooling import (
    MODULES,
    NAMED,
    EmbeddingFiles,
    Pooling,
    limits_file,
    read_embedding_files,
    read_gguf_pooling,
    read_pooling,
    read_size,
    tokenizer_limit,
)
from services.compute.model.loading.sampling import SamplingDefaults, read_sampling
from services.compute.model.loading.tokenizer import TokenizerFiles, read_tokenizer, tokenizer_of
from services.compute.model.registry import Description, describe
from services.compute.model.spec import ModelError, ModelSpec

T = TypeVar("T")

# The properties that `problems` reads: those for gateways, and those that only our own engine uses.
_FOR_GATEWAYS = ("tokenizer", "chat_template", "eos_token_ids", "sampling")
_FOR_RANKS = ("images", "sentence_limits", "sentence_config", "pooling", "embedding")


@dataclass(frozen=True)
class ModelFolder:
    """A Hugging Face folder. Each property reads its files on first use, once, and raises ModelError naming the file.

    `require` reads all of them, and names every problem.
    """

    path: Path
    whole: bool = True  # False: the weights are not there
    vocab_size: int | None = None  # rows of the embedding, for an architecture of any family; None: the spec's
    described: Description | None = None  # known from an earlier reader

    @cached_property
    def problems(self) -> tuple[str, ...]:
        """Every reason why the model cannot be served; its tensors are not compared with its config."""
        problems: dict[str, None] = {}  # a broken file is the reason of every property that needs it

        def attempt(read: Callable[[], T]) -> T | None:
            try:
                return read()
            except ModelError as error:
                problems[str(error)] = None
                return None

        ours = self.vocab_size is None
        described = not ours or attempt(lambda: self.description) is not None
        for file in attempt(lambda: self.weights) or ():
            attempt(partial(read_header, file))
        folder = self if described else replace(self, vocab_size=MAX_INTEGER)
        for name in (*_FOR_GATEWAYS, *(_FOR_RANKS if ours else ())):
            attempt(partial(attrgetter(name), folder))
        if not problems:
            attempt(lambda: self.identity)  # reads samples of the weights
        return tuple(problems)

    def require(self) -> Self:
        """Read all files. Raises ModelError with every problem."""
        if self.problems:
            raise ModelError("; ".join(self.problems))
        return self

    @cached_property
    def description(self) -> Description:
        """The architecture, of a family of ours."""
        return self.described or describe(self.path)

    @property
    def spec(self) -> ModelSpec:
        """The model's spec."""
        return self.description.spec

    @property
    def architecture(self) -> str:
        """The name of the architecture."""
        return ", ".join(self.config.stored.get("architectures") or [self.spec.family])

    @cached_property
    def config(self) -> Config:
        """The config.json."""
        return self.description.config if self.vocab_size is None else Config.load(self.path)

    @cached_property
    def weights(self) -> tuple[Path, ...]:
        """The files of the weights; none if they are not there."""
        return weight_files(self.path).files if self.whole else ()

    @property
    def states(self) -> FileStates:
        """The states of the weights' files now."""
        return file_states(self.weights)

    @cached_property
    def identity(self) -> str:
        """A digest, equal for equal models in any folder."""
        return identity(self.config.content, self.weights)

    @cached_property
    def tokenizer_config(self) -> dict[str, Any]:
        """The tokenizer_config.json."""
        settings: dict[str, Any] = read_json(self.path / "tokenizer_config.json")
        return settings

    @cached_property
    def tokenizer(self) -> TokenizerFiles:
        """The tokenizer and its special tokens."""
        return read_tokenizer(self.path, self.tokenizer_config, self._vocab_size)

    @cached_property
    def chat_template(self) -> str:
        """The chat template; "" if there is none."""
        return read_chat_template(self.path, self.tokenizer_config)

    @cached_property
    def generation(self) -> tuple[Path, dict[str, Any]]:
        """The file of the publisher's defaults for generation, and its contents."""
        file = self.path / "generation_config.json"
        return file, read_json(file)

    @cached_property
    def sampling(self) -> SamplingDefaults:
        """The publisher's defaults for sampling."""
        return read_sampling(*self.generation)

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a text, each once, without those that the model has no embedding for."""
        # Each source may have its own end tokens: a chat ends with the tokenizer's, a text with the model's.
        ends = (*end_tokens(*self.generation), *self._config_ends, *self._tokenizer_ends)
        return tuple(dict.fromkeys(end for end in ends if 0 <= end < self._vocab_size))

    @cached_property
    def images(self) -> ImageProcessing | None:
        """How images are prepared; None for a model that reads text only."""
        vision = self.spec.vision
        return None if vision is None else read_image_processing(self.path, vision)

    @cached_property
    def sentence_limits(self) -> dict[str, Any]:
        """The sentence_bert_config.json, under the name that it has."""
        settings: dict[str, Any] = read_json(limits_file(self.path))
        return settings

    @cached_property
    def sentence_config(self) -> dict[str, Any]:
        """The config_sentence_transformers.json."""
        settings: dict[str, Any] = read_json(self.path / NAMED)
        return settings

    @cached_property
    def pooling(self) -> Pooling:
        """How hidden states become an embedding: a classifier's as its architecture says."""
        classifier = self.spec.classifier if self.vocab_size is None else None
        if classifier is not None:
            return Pooling(classifier.pooling, normalise=False)
        return replace(read_pooling(self.path), size=read_size(self.path / NAMED, self.sentence_config))

    @cached_property
    def embedding(self) -> EmbeddingFiles:
        """The files of sentence-transformers besides the pooling."""
        files = read_embedding_files(self.path, self.sentence_limits, self.sentence_config)
        if files.max_tokens is None and (self.path / MODULES).is_file():
            return replace(files, max_tokens=tokenizer_limit(self.tokenizer_config))
        return files

    @property
    def _vocab_size(self) -> int:
        return self.spec.vocab_size if self.vocab_size is None else self.vocab_size

    @property
    def _config_ends(self) -> tuple[int, ...]:
        if self.vocab_size is None:
            return self.spec.eos_token_ids
        text = self.config.stored.get("text_config")
        return end_tokens(self.config.file, text if isinstance(text, dict) else self.config.stored)

    @property
    def _tokenizer_ends(self) -> tuple[int, ...]:
        end = self.tokenizer.eos_token_id
        return () if end is None else (end,)


@dataclass(frozen=True)
class GgufModel(ModelFolder):
    """A GGUF file, perhaps the first of several parts; a generation_config.json next to it outweighs its sampling."""

    @cached_property
    def problems(self) -> tuple[str, ...]:
        """Every reason why the model cannot be served; a file that is no GGUF file has one."""
        try:
            _ = self.hub
        except ModelError as error:
            return (str(error),)
        return super().problems

    @cached_property
    def hub(self) -> HubFiles:
        """The small files that a folder of the hub would have."""
        assert self.description.gguf is not None
        return hub_files(self.description.gguf.metadata)

    @property
    def architecture(self) -> str:
        """The name of the architecture."""
        return self.description.family.architecture

    @cached_property
    def weights(self) -> tuple[Path, ...]:
        """No file of safetensors."""
        return ()

    @property
    def states(self) -> FileStates:
        """The states of the model's files now."""
        return file_states(files_of(self.path))

    @cached_property
    def identity(self) -> str:
        """A digest, equal for equal models in any folder."""
        return identity(b"", files_of(self.path))

    @cached_property
    def tokenizer_config(self) -> dict[str, Any]:
        """The settings of the tokenizer."""
        return self.hub.tokenizer_config

    @cached_property
    def tokenizer(self) -> TokenizerFiles:
        """The tokenizer and its special tokens."""
        return tokenizer_of(self.hub)

    @cached_property
    def chat_template(self) -> str:
        """The chat template; "" if there is none."""
        return chat_template_of(self.path, self.tokenizer_config)

    @cached_property
    def generation(self) -> tuple[Path, dict[str, Any]]:
        """The file itself and its defaults for generation."""
        return self.path, self.hub.generation_config

    @cached_property
    def sampling(self) -> SamplingDefaults:
        """The publisher's defaults for sampling."""
        file = self.path.with_name("generation_config.json")
        return read_sampling(file if file.is_file() else self.path, self.hub.generation_config | read_json(file))

    @cached_property
    def pooling(self) -> Pooling:
        """How hidden states become an embedding."""
        assert self.description.gguf is not None
        return read_gguf_pooling(self.description.gguf.metadata)

    @cached_property
    def embedding(self) -> EmbeddingFiles:
        """No file of sentence-transformers."""
        return EmbeddingFiles()


@dataclass(frozen=True, slots=True)
class KnownFiles:
    """Facts about a model's files that hold while they are unchanged: the weights are finite."""

    states: FileStates
    description: Description  # without a vocabulary

    @classmethod
    def of(cls, folder: ModelFolder, states: FileStates) -> KnownFiles:
        """Return what a reader of the folder and of all weights knows, whose files had these `states` before."""
        description = folder.description
        if description.gguf is not None:
            description = replace(description, gguf=description.gguf.without_vocabulary())
        return cls(states, description)


def open_folder(path: Path, *, whole: bool = True, vocab_size: int | None = None) -> ModelFolder:
    """Return the folder or the GGUF file `path`, of which nothing is read yet."""
    return (GgufModel if path.is_file() else ModelFolder)(path, whole, vocab_size)
