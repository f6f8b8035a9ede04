"""Reads the folder of a LoRA adapter as PEFT saves it: `adapter_config.json` and `adapter_model.safetensors`.

The tensors say what was trained; `target_modules` is not read. Free of torch, because the server process uses it, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import sqrt
from pathlib import Path
from typing import Any

from services.compute.model.files import FLOATS, StoredEntry, read_header, read_json
from services.compute.model.spec import ModelError

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
BEFORE = "base_model.model."  # PEFT's prefix of the names of a model's modules
A, B = ".lora_A.weight", ".lora_B.weight"
# Keys of the configuration that `ryzanstein merge` reads.
MERGED = ("use_dora", "modules_to_save", "bias", "target_parameters")
MERGE = "`ryzanstein merge` makes a model of base and adapter, which can be served"

# Ways to train that keep something else in the base's weights than the base, so that A and B alone are not the change.
_REPLACED_BASE = ("pissa", "olora", "corda", "loftq")

# Keys of the configuration with the values, beside null, with which A and B alone are the change.
_PLAIN: Mapping[str, tuple[object, ...]] = {
    "use_dora": (False,),
    "modules_to_save": ([],),
    "bias": ("none",),
    "lora_bias": (False,),
    "trainable_token_indices": ([], {}),
    "layer_replication": ([],),
    "target_parameters": ([],),
    "alora_invocation_tokens": ([],),
    "use_qalora": (False,),
    "use_bdlora": (),
    "arrow_config": (),
}


@dataclass(frozen=True, slots=True)
class Factors:
    """The factors of one module: its weight changes by scale * B A."""

    module: str  # transformers' name
    rank: int
    scale: float
    n_out: int
    n_in: int

    @property
    def a(self) -> str:
        """The name of A, [rank, n_in]."""
        return f"{BEFORE}{self.module}{A}"

    @property
    def b(self) -> str:
        """The name of B, [n_out, rank]."""
        return f"{BEFORE}{self.module}{B}"


@dataclass(frozen=True)
class PeftFolder:
    """The configuration of an adapter, and what its file says of its tensors."""

    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, StoredEntry]

    @classmethod
    def open(cls, folder: Path) -> PeftFolder:
        """Read configuration and header. Raises ModelError naming the file and the key."""
        file = folder / CONFIG
        if not file.is_file():
            raise ModelError(f"{folder}: no {CONFIG}: not the folder of a PEFT adapter")
        config = read_json(file)
        if config.get("peft_type") != "LORA":
            raise ModelError(f"{file}: peft_type: expected LORA, found {config.get('peft_type')!r}")
        if not (folder / TENSORS).is_file():
            pickles = (folder / "adapter_model.bin").is_file()
            why = "adapter_model.bin is a pickle, which is refused: reading one runs the code in it" if pickles else ""
            raise ModelError(f"{folder}: no {TENSORS}" + (f"; {why}" if why else ""))
        found = cls(folder, config, read_header(folder / TENSORS))
        found._check_config()
        return found

    @property
    def file(self) -> Path:
        """The file of the tensors."""
        return self.folder / TENSORS

    def error(self, key: str, message: str) -> ModelError:
        """Return an error about a key of the configuration."""
        return ModelError(f"{self.folder / CONFIG}: {key}: {message}")

    def require_plain(self, but: Sequence[str] = ()) -> None:
        """Raise ModelError for a key that means more than A and B, except those in `but`."""
        for key, plain in _PLAIN.items():
            value = self.config.get(key)
            if value is None or value in plain or key in but:
                continue
            hint = "" if but or key not in MERGED else f"; {MERGE}"
            raise self.error(key, f"{value!r} is not implemented{hint}")

    @cached_property
    def modules(self) -> tuple[str, ...]:
        """Transformers' names of the modules that have an A or a B."""
        ends = {name.removesuffix(end) for name in self.tensors for end in (A, B) if name.endswith(end)}
        return tuple(name.removeprefix(BEFORE) for name in sorted(ends) if name.startswith(BEFORE))

    @cached_property
    def factors(self) -> tuple[Factors, ...]:
        """The factors of all `modules`. Raises ModelError naming the tensor."""
        return tuple(map(self.factors_of, self.modules))

    def others(self) -> list[str]:
        """The names of the tensors that are no factors."""
        ours = {f"{BEFORE}{module}{end}" for module in self.modules for end in (A, B)}
        return sorted(self.tensors.keys() - ours)

    def shapes(self, module: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of a module's A and B. Raises ModelError naming the tensor."""
        a, b = (f"{BEFORE}{module}{end}" for end in (A, B))
        for name, other in ((a, b), (b, a)):
            if name not in self.tensors:
                raise ModelError(f"{self.file}: {name}: missing; {other} is there")
            if self.tensors[name].dtype not in FLOATS or len(self.tensors[name].shape) != 2:
                raise ModelError(f"{self.file}: {name}: expected a matrix of {' or '.join(FLOATS)}")
        return self.tensors[a].shape, self.tensors[b].shape

    def factors_of(self, module: str) -> Factors:
        """Return the factors of a linear layer. Raises ModelError naming the tensor."""
        (rank, n_in), (n_out, other_rank) = self.shapes(module)
        a, b = (f"{BEFORE}{module}{end}" for end in (A, B))
        wanted = self.rank(module)
        if not rank == other_rank == wanted:
            raise ModelError(
                f"{self.file}: {a}: rank {rank} beside rank {other_rank} of {b}; {CONFIG} says {wanted} for this module"
            )
        return Factors(module, rank, self.scale(module, rank), n_out, n_in)

    def rank(self, module: str) -> int:
        """Return the rank that the configuration gives a module or a parameter."""
        return int(self._pattern("rank_pattern", module, self.config["r"]))

    def scale(self, module: str, rank: int) -> float:
        """Return the factor of B A."""
        alpha = float(self._pattern("alpha_pattern", module, self.config["lora_alpha"]))
        return alpha / (sqrt(rank) if self.config.get("use_rslora") else rank)

    def _pattern(self, key: str, module: str, default: float) -> float:
        """Return the value of the first pattern that fits the end of the module's name, after a dot or as a whole."""
        for pattern, value in (self.config.get(key) or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", module):
                return float(value)
        return default

    def _check_config(self) -> None:
        config = self.config
        for key, least in (("r", 1), ("lora_alpha", 0)):
            value = config.get(key)
            if isinstance(value, bool) or not isinstance(value, int | float) or value < least:
                raise self.error(key, f"expected a number from {least} on, found {value!r}")
        for key in ("rank_pattern", "alpha_pattern"):
            patterns = config.get(key) or {}
            try:
                for pattern, value in patterns.items():
                    re.compile(pattern)
                    if isinstance(value, bool) or not isinstance(value, int | float):
                        raise ValueError(f"expected a number for {pattern!r}, found {value!r}")
            except (AttributeError, TypeError, ValueError, re.error) as error:
                raise self.error(key, f"expected numbers by pattern: {error}") from error
        start = str(config.get("init_lora_weights"))
        if start.lower().startswith(_REPLACED_BASE):
            raise self.error(
                "init_lora_weights",
                f"{start!r} changes the base's weights, too; save it with path_initial_model_for_weight_conversion",
            )
