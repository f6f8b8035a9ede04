"""Reads a Hugging Face config.json so that no key with a meaning is passed over in silence."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from services.worker.model.spec import ModelError

T = TypeVar("T")

# Keys that do not change what the forward pass computes at inference.
_HARMLESS_KEYS = """
    architectures model_type transformers_version torch_dtype dtype use_cache initializer_range initializer_factor
    attention_dropout attention_probs_dropout_prob hidden_dropout hidden_dropout_prob resid_pdrop embd_pdrop
    attn_pdrop resid_dropout embd_dropout classifier_dropout summary_activation summary_first_dropout
    summary_proj_to_labels summary_type summary_use_proj task_specific_params bos_token_id pad_token_id
    eos_token_id unk_token_id sep_token_id cls_token_id mask_token_id auto_map return_dict return_dict_in_generate
    output_attentions output_hidden_states output_router_logits router_aux_loss_coef router_jitter_noise
    id2label label2id problem_type finetuning_task chunk_size_feed_forward is_decoder
    cross_attention_hidden_size tie_encoder_decoder decoder_start_token_id prefix
    tokenizer_class torchscript use_bfloat16 pruned_heads n_ctx reorder_and_upcast_attn vocab_size_per_layer_input
    cache_implementation unsloth_fixed unsloth_version
    """
_HARMLESS = frozenset(_HARMLESS_KEYS.split())
_OFF = frozenset({"add_cross_attention", "is_encoder_decoder", "quantization_config", "use_bidirectional_attention"})


class Config:
    """The keys of one config.json; remembers which of them were read."""

    def __init__(self, values: Mapping[str, Any], file: Path) -> None:
        self._values, self._file = values, file
        self._read: set[str] = set()

    @classmethod
    def load(cls, folder: Path) -> Config:
        """Read `folder`/config.json. Raises ModelError."""
        file = folder / "config.json"
        try:
            values = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise ModelError(f"{file}: {error}") from error
        if not isinstance(values, dict):
            raise ModelError(f"{file}: not a JSON object")
        return cls(values, file)

    def error(self, key: str, problem: str) -> ModelError:
        """Return the error that names this file and `key`."""
        return ModelError(f"{self._file}: {key}: {problem}")

    def raw(self, key: str) -> Any:
        """Return the value of `key`, None if absent."""
        self._read.add(key)
        return self._values.get(key)

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a positive integer. Raises ModelError."""
        value = self.raw(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise self.error(key, f"expected a positive integer, found {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number. Raises ModelError."""
        value = self.raw(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.error(key, f"expected a number, found {value!r}")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """Return a number, or None where the key is absent or null. Raises ModelError."""
        return None if self.raw(key) is None else self.number(key)

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean. Raises ModelError."""
        value = self.raw(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.error(key, f"expected true or false, found {value!r}")
        return value

    def choice(self, key: str, choices: Mapping[str, T], default: str | None = None) -> T:
        """Return what the value of `key` stands for. Raises ModelError on a value without meaning here."""
        value = self.raw(key)
        value = default if value is None else value
        if not isinstance(value, str) or value not in choices:
            raise self.error(key, f"{value!r} is not implemented; known: {', '.join(choices)}")
        return choices[value]

    def require(self, key: str, *allowed: object) -> None:
        """Accept `key` only where it is absent, null or one of `allowed`. Raises ModelError."""
        value = self.raw(key)
        if value is not None and value not in allowed:
            raise self.error(key, f"{value!r} is not implemented; allowed: {', '.join(map(repr, allowed)) or 'null'}")

    def finish(self) -> None:
        """Raise ModelError for keys that nobody read and that may have a meaning."""
        for key, value in self._values.items():
            known = key in self._read or key in _HARMLESS or key.startswith("_") or value is None
            if not known and not (key in _OFF and value is False):
                raise self.error(key, f"{value!r} is not implemented for this architecture")
