"""The keys of one architecture in a GGUF file: those that were read, and values that change nothing. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from services.compute.model.formats.gguf.metadata import GgufMetadata
from services.compute.model.spec import ModelError

_BLOCKS = "block_count"
# Keys that do not change the computation, or repeat what tensors show.
PASSED = (
    *("vocab_size", "rope.scaling.finetuned", "tensor_data_layout", "pooling_type"),
    *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "rope.scaling.original_context_length"),
)
# Values besides 0, false and "" that leave the computation as it is where a key is not read.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "attention.output_scale": (1.0,),
    "embedding_scale": (1.0,),
    "expert_gating_func": (1,),  # softmax
    "expert_group_count": (1,),
    "expert_group_used_count": (1,),
    "expert_weights_scale": (1.0,),
    "interleave_moe_layer_step": (1,),
    "logit_scale": (1.0,),
    "residual_scale": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
}
_SWITCHES = ("attention.causal", "expert_weights_norm")  # on where they are absent
_TOLERANCE = 1e-6  # tolerance for the rounding of 32-bit numbers


class Keys:
    """The keys of the file's architecture; it records which were read."""

    def __init__(self, metadata: GgufMetadata, passed: tuple[str, ...]) -> None:
        """`passed`: keys of this architecture that have no effect, in addition to those of all."""
        self.metadata = metadata
        self.prefix = f"{metadata.text('general.architecture')}."
        self._read = {f"{self.prefix}{key}" for key in (*PASSED, *passed)}

    def value(self, key: str, *, sparse: bool = False) -> Any:
        """Return a value of any type, that of all layers if it is a list with one for each; None if it is absent.

        `sparse`: the list has a 0 for each layer without that part. Raises ModelError for layers whose values differ.
        """
        value = self.metadata.get(self._seen(key))
        if not isinstance(value, tuple):
            return value
        n_layers = self.metadata.integer(f"{self.prefix}{_BLOCKS}", 0)
        distinct = set(value) - {0} if sparse else set(value)
        if len(value) != n_layers or len(distinct) > 1:
            equal = "equal ones, or 0" if sparse else "equal ones"
            problem = f"expected a number, or {n_layers} {equal}, as many as {_BLOCKS}, found {list(value[:8])}"
            raise self.error(key, problem)
        return next(iter(distinct), None)

    def layers(self, key: str) -> list[bool]:
        """Return for each layer whether it has the part of a sparse key."""
        value, n_layers = self.values(key), self.integer(_BLOCKS, 0)
        return [bool(one) for one in value] if isinstance(value, tuple) else [value != 0] * max(n_layers, 0)

    def values(self, key: str) -> Any:
        """Return a value of any type as the file holds it; None if it is absent."""
        return self.metadata.get(self._seen(key))

    def integer(self, key: str, default: int | None = None) -> int:
        """Return an integer; `default` if the key is absent. Raises ModelError."""
        return self.metadata.integer(self._seen(key), default)

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number; `default` if the key is absent. Raises ModelError."""
        return self.metadata.number(self._seen(key), default)

    def text(self, key: str, default: str) -> str:
        """Return a text; `default` if the key is absent. Raises ModelError."""
        return self.metadata.text(self._seen(key), default)

    def error(self, key: str, problem: str) -> ModelError:
        """Return an error that names the file and the key."""
        return self.metadata.error(f"{self.prefix}{key}", problem)

    def require(self, *needed: str) -> None:
        """Raise ModelError for a key that is absent."""
        for key in needed:
            if f"{self.prefix}{key}" not in self.metadata:
                raise self.error(key, "missing; its value cannot be guessed")

    def refuse_unread(self, repeated: Mapping[str, float]) -> None:
        """Raise ModelError for keys that may change the computation; `repeated`: values that keys may say again."""
        for name, value in self.metadata.items():
            key = name.removeprefix(self.prefix)
            if key == name or name in self._read or _is_neutral(key, value, repeated):
                continue
            allowed = repeated.get(key) or ("true" if key in _SWITCHES else next(iter(_NEUTRAL.get(key, ())), None))
            hint = "" if allowed is None else f"; allowed: {allowed}"
            raise self.metadata.error(name, f"{_said(value)} is not implemented for this architecture{hint}")

    def _seen(self, key: str) -> str:
        name = f"{self.prefix}{key}"
        self._read.add(name)
        return name


def _is_neutral(key: str, value: object, repeated: Mapping[str, float]) -> bool:
    """Whether a value leaves the computation as it is; in a list each one has to."""
    if isinstance(value, tuple):
        return all(_is_neutral(key, one, repeated) for one in value)
    if key in repeated:
        return isinstance(value, int | float) and math.isclose(value, repeated[key], rel_tol=_TOLERANCE)
    if key in _SWITCHES:
        return value is True
    return not value or (value in _NEUTRAL.get(key, ()) and not isinstance(value, bool))


def _said(value: object) -> str:
    return (
        f"a list of {len(value)}"
        if isinstance(value, tuple)
        else str(value).lower()
        if isinstance(value, bool)
        else repr(value)
    )
