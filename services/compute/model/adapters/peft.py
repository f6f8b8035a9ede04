"""Reads the folder of a LoRA adapter as PEFT saves it: `adapter_config.json` and `adapter_model.safetensors`.

The tensors say what was trained; `target_modules` is not read. Free of torch, because the server process also uses it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import sqrt
from pathlib import Path
from typing import Any

from services.compute.model.adapters.finite import LARGEST, check_finite
from services.compute.model.files import FLOATS, StoredEntry, read_header, read_json
from services.compute.model.spec import ModelError

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
BEFORE = "base_model.model."  # PEFT's prefix of the names of a model's modules
A, B = ".lora_A.weight", ".lora_B.weight"
# Keys of the configuration that `ryzanstein merge` reads.
MERGED = ("use_dora", "modules_to_save", "bias", "target_parameters")
MERGE = "`ryzanstein merge` makes a model of base and adapter, which can be served"

# Ways to begin the training that leave the base as it is; others keep a part of the change in its weights.
_BEGUN = ("gaussian", "eva", "orthogonal", "mica")
# Keys of the configuration that are read here, or by `ryzanstein merge`.
READ = ("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights")
READ_BY_MERGE = ("ensure_weight_tying",)
# Keys without an effect on what a trained adapter computes: where it comes from, what was trained and how the base
# stores it, which the tensors show, how it was trained, and settings of keys that are refused.
PASSED = (
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout", "fan_in_fan_out"),
    *("megatron_config", "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
    *("velora_config", "monteclora_config", "qalora_group_size", "runtime_config"),
    *("lora_dtype", "lorap_lr_ratio", "lorap_emb_lr", "merge_weights"),  # other programs' and PEFT's first keys
)
_IN_TRAINING = (".lora_velora_", ".lora_monteclora_")  # name parts of tensors that only the training uses

# Keys of the configuration with the values, besides null, with which A and B alone are the change.
PLAIN: Mapping[str, tuple[object, ...]] = {
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
    "kasa_config": (),
}
_KNOWN = frozenset((*READ, *READ_BY_MERGE, *PASSED, *PLAIN))


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
        peft = cls(folder, config, read_header(folder / TENSORS))
        peft._check_config()
        return peft

    @property
    def file(self) -> Path:
        """The file of the tensors."""
        return self.folder / TENSORS

    def error(self, key: str, message: str) -> ModelError:
        """Return an error about a key of the configuration."""
        return ModelError(f"{self.folder / CONFIG}: {key}: {message}")

    def require_plain(self, but: Sequence[str] = (), hint: str = "") -> None:
        """Raise ModelError for a key that means more than A and B, except those in `but`.

        `hint` follows the message about a key that a merge reads.
        """
        for key, plain in PLAIN.items():
            value = self.config.get(key)
            if value is not None and value not in plain and key not in but:
                raise self.error(key, f"{value!r} is not implemented{hint if key in MERGED else ''}")

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
        return sorted(name for name in self.tensors.keys() - ours if not any(part in name for part in _IN_TRAINING))

    def require_finite(self) -> None:
        """Raise ModelError naming a tensor that holds what is no number in float32; reads all tensors."""
        check_finite(self.file, self.tensors, {f"{BEFORE}{module}{B}": self._scale(module) for module in self.modules})

    def shapes(self, module: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of a module's A and B. Raises ModelError naming the tensor."""
        a, b = (f"{BEFORE}{module}{end}" for end in (A, B))
        for name, other in ((a, b), (b, a)):
            if name not in self.tensors:
                raise ModelError(f"{self.file}: {name}: missing; {other} is there")
            dtype, shape = self.tensors[name].dtype, self.tensors[name].shape
            if dtype not in FLOATS or len(shape) != 2 or 0 in shape:
                stored = f"{dtype} of the shape {list(shape)}"
                raise ModelError(f"{self.file}: {name}: expected a matrix of {' or '.join(FLOATS)}, found {stored}")
        return self.tensors[a].shape, self.tensors[b].shape

    def factors_of(self, module: str) -> Factors:
        """Return the factors of a linear layer. Raises ModelError naming the tensor."""
        (rank, n_in), (n_out, other_rank) = self.shapes(module)
        a, b = (f"{BEFORE}{module}{end}" for end in (A, B))
        wanted = self.rank(module)
        if not rank == other_rank == wanted:
            raise ModelError(
                f"{self.file}: {a}: rank {rank} with rank {other_rank} of {b}; {CONFIG} says {wanted} for this module"
            )
        return Factors(module, rank, self.scale(module, rank), n_out, n_in)

    def rank(self, module: str) -> int:
        """Return the rank that the configuration gives a module or a parameter."""
        return int(self._pattern("rank_pattern", module, self.config["r"]))

    def _scale(self, module: str) -> float:
        (rank, _), _ = self.shapes(module)
        return self.scale(module, rank)

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
        try:
            _require_number("r", config.get("r"), 1, whole=True)
            _require_number("lora_alpha", config.get("lora_alpha"), 0)
            for key in ("use_rslora", "fan_in_fan_out"):
                if not isinstance(config.get(key), bool | None):
                    raise ValueError(f"{key}: expected true or false, found {config[key]!r}")
            for key, least in (("rank_pattern", 1), ("alpha_pattern", 0)):
                for pattern, value in _patterns(key, config.get(key)).items():
                    _require_number(f"{key}: {pattern!r}", value, least, whole=key == "rank_pattern")
        except ValueError as error:
            raise ModelError(f"{self.folder / CONFIG}: {error}") from error
        self._check_meaning()

    def _check_meaning(self) -> None:
        """Refuse what changes the base, and keys without a known meaning."""
        start = self.config.get("init_lora_weights")
        if not (start is None or isinstance(start, bool) or str(start).lower() in _BEGUN):
            raise self.error(
                "init_lora_weights",
                f"{start!r} changes the base's weights; save it with path_initial_model_for_weight_conversion "
                f"(without a change of the base: true, false, {', '.join(_BEGUN)})",
            )
        for key, value in self.config.items():
            if key not in _KNOWN and value:
                raise self.error(key, f"{value!r} is not known; PEFT 0.21 has no such key for LoRA")


def _require_number(key: str, value: object, least: int, *, whole: bool = False) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and value >= least  # False for NaN
    if not number or (whole and value % 1):  # type: ignore[operator]
        kind = "whole number" if whole else "number"
        raise ValueError(f"{key}: expected a {kind} from {least} on, found {value!r}")
    if value > LARGEST:  # type: ignore[operator]
        raise ValueError(f"{key}: {value!r} is beyond float32")


def _patterns(key: str, value: object) -> dict[str, object]:
    """Return values by pattern; raises ValueError."""
    if not isinstance(value, dict | None):
        raise ValueError(f"{key}: expected numbers by pattern, found {value!r}")
    for pattern in value or {}:
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"{key}: expected numbers by pattern: {pattern!r}: {error}") from error
    return value or {}
