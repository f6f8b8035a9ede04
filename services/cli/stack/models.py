"""The models of a local installation: `--model SOURCE[:QUANTIZATION]`, which may be repeated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from services.cli.errors import CommandError
from services.common import denied
from services.common.adapters import check_name
from services.common.gguf_files import find_model, local_path, model_name, split_choice
from services.common.worker_options import Quantization

_QUANTIZATIONS: dict[str, Quantization] = {word: word for word in get_args(Quantization)}


@dataclass(frozen=True, slots=True)
class UpModel:
    """One model of the installation."""

    source: str  # a folder, a GGUF file or a hub id
    quantization: Quantization
    given_name: str = ""  # the name that clients use; "": its own
    pinned: bool = False  # it never sleeps
    priority: int = 0  # idle models with the lowest one sleep first

    @property
    def name(self) -> str:
        """The name that clients use, by the rule of workers."""
        return self.given_name or model_name(self.source) or Path(self.source).expanduser().resolve().name

    def check(self) -> None:
        """Raise :class:`CommandError` for a source that cannot be served."""
        try:
            self._check_source()
        except PermissionError as error:
            raise CommandError(f"--model {self.source}: {denied.reason(Path(error.filename))}") from error
        except ValueError as error:
            raise CommandError(f"--model {error}{self._allowed_after_colon()}") from error
        try:
            check_name(self.given_name or "default")
        except ValueError as error:
            raise CommandError(f"--served-model-name: {error}") from error

    def _check_source(self) -> None:
        path, choice = local_path(self.source), split_choice(self.source)[1]
        if path is None or not path.is_dir() or (not choice and (path / "config.json").is_file()):
            return
        try:
            file = find_model(path, choice)
        except ValueError as error:
            raise ValueError(f"{self.source}: {error}") from error
        if file is None:
            raise ValueError(f"{self.source}: the folder has neither config.json nor a GGUF file")

    def _allowed_after_colon(self) -> str:
        """The words that may follow the last colon; "" for a source without one."""
        if not split_choice(self.source)[1]:
            return ""
        return f"; after a colon: a quantization ({', '.join(_QUANTIZATIONS)}), or the end of a GGUF file's name"


def read_models(
    given: Sequence[str],
    quantization: Quantization,
    names: Sequence[str],
    pins: Container[str],
    priorities: Mapping[str, int],
) -> tuple[UpModel, ...]:
    """The models in the given order; `quantization` is for those that name none. Raises :class:`CommandError`.

    `pins`: names of models that never sleep; `priorities`: by model's name.
    """
    if names and len(names) != len(given):
        raise CommandError(f"--served-model-name: expected one for each of {len(given)} models, found {len(names)}")
    sources = [_split_quantization(text) for text in given]
    models = [
        UpModel(source, chosen or quantization, name)
        for (source, chosen), name in zip(sources, names or [""] * len(given), strict=True)
    ]
    same = [name for name, count in Counter(model.name for model in models).items() if count > 1]
    if same:
        raise CommandError(
            f"--model: {', '.join(same)} is the name of several models; give each a --served-model-name, in their order"
        )
    return tuple(replace(model, pinned=model.name in pins, priority=priorities.get(model.name, 0)) for model in models)


def _split_quantization(text: str) -> tuple[str, Quantization | None]:
    """Return a source and the quantization after its last colon; a path that exists is a source as a whole."""
    source, _, word = text.rpartition(":")
    if not source or word not in _QUANTIZATIONS or Path(text).expanduser().exists():
        return text, None
    return source, _QUANTIZATIONS[word]
