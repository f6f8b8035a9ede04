"""Reads a Hugging Face config.json and refuses every unknown key that has a meaning."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

from services.compute.model.files import decode_json, refuse_pointer
from services.compute.model.spec import ModelError

T = TypeVar("T")

MAX_INTEGER = 2**31 - 1  # sizes of models are much smaller; larger ones overflow arithmetic and messages
MAX_LAYERS = 1000  # eight times the layers of the largest models

# Keys that never change the forward pass: training, other tasks, other programs, defaults of generation (clients choose
# them), and keys that the tokenizer's files override.
_HARMLESS_KEYS = """
    architectures model_type transformers_version torch_dtype dtype use_cache initializer_range initializer_factor
    attention_dropout attention_probs_dropout_prob hidden_dropout hidden_dropout_prob resid_pdrop embd_pdrop
    attn_pdrop resid_dropout embd_dropout classifier_dropout summary_activation summary_first_dropout
    summary_proj_to_labels summary_type summary_use_proj task_specific_params bos_token_id pad_token_id
    eos_token_id unk_token_id sep_token_id cls_token_id mask_token_id auto_map return_dict return_dict_in_generate
    output_attentions output_hidden_states output_router_logits router_aux_loss_coef router_jitter_noise
    id2label label2id num_labels problem_type finetuning_task chunk_size_feed_forward is_decoder
    cross_attention_hidden_size tie_encoder_decoder decoder_start_token_id prefix
    tokenizer_class torchscript use_bfloat16 pruned_heads n_ctx reorder_and_upcast_attn vocab_size_per_layer_input
    cache_implementation unsloth_fixed unsloth_version output_past custom_pipelines custom_pipeline
    transformers.js_config gradient_checkpointing use_gradient_checkpointing keys_to_ignore_at_inference
    num_nextn_predict_layers num_logits_to_keep attn_implementation use_flash_attn use_flash_attention flash_attn
    _flash_attn_2_enabled use_cache_quantization use_cache_kernel predict_special_tokens is_llama_config
    tokenizer_model_max_length tokenizer_padding_side model_max_length neftune_noise_alpha trl_sft
    onnx_config quantization_config_original deepspeed use_deepspeed_checkpointing
    do_sample max_length min_length num_beams num_beam_groups num_return_sequences early_stopping temperature top_k
    top_p typical_p repetition_penalty length_penalty diversity_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids suppress_tokens begin_suppress_tokens forced_bos_token_id
    forced_eos_token_id exponential_decay_length_penalty remove_invalid_values output_scores max_new_tokens
    tf_legacy_loss max_sequence_length model_name
    """
_HARMLESS = frozenset(_HARMLESS_KEYS.split())

# Keys of switches that a family may not know, with the value that leaves them off. Elsewhere the family reads them.
_NEUTRAL: Mapping[str, object] = {
    "add_cross_attention": False,
    "is_encoder_decoder": False,
    "is_causal": True,
    "use_bidirectional_attention": False,
    "attention_bias": False,
    "attention_out_bias": False,
    "attention_in_bias": False,
    "qkv_bias": False,
    "mlp_bias": False,
    "lm_head_bias": False,
    "bias": False,
    "use_bias": False,
    "use_qk_norm": False,
    "qk_layernorm": False,
    "use_qkv_bias": False,
    "use_mrope": False,
    "use_sliding_window": False,
    "rope_interleaved": False,
    "use_parallel_residual": False,
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "pretraining_tp": 1,
    "ep_size": 1,
    "shared_expert_intermediate_size": 0,
    "num_experts": 0,
    "num_local_experts": 0,
    "n_special": 0,
    "layer_norm_elementwise_affine": True,
    "embedding_multiplier": 1,
    "residual_multiplier": 1,
    "logits_scaling": 1,
    "logit_scale": 1,
}
# Keys that only repeat another key.
_REPEATED: Mapping[str, str] = {
    "sliding_window_size": "sliding_window",
    "rope_theta": "rotary_emb_base",  # gpt_neox
    "partial_rotary_factor": "rotary_pct",
    "max_seq_len": "max_position_embeddings",
    "seq_length": "max_position_embeddings",
    "num_layers": "num_hidden_layers",
}


class Config:
    """The keys of one config.json; it records which keys were read."""

    def __init__(
        self,
        values: Mapping[str, Any],
        file: Path,
        within: Config | None = None,
        name: str = "",
        content: bytes = b"",
    ) -> None:
        """`within` is the configuration that holds these values as the section `name`; `content`: the file's bytes."""
        self.file = file
        self.stored = values  # as the file says them; families change others
        self.content = content
        self._values = dict(values)
        self._read: set[str] = set()
        self._problems: list[str] = [] if within is None else within._problems
        self._path: str = "" if within is None else f"{within._path}{name}."
        self._sections: list[Config] = []

    @classmethod
    def load(cls, folder: Path) -> Config:
        """Read `folder`/config.json. Raises ModelError."""
        file = folder / "config.json"
        refuse_pointer(file)
        try:
            content = file.read_bytes()
            values = decode_json(content)
        except (OSError, ValueError) as error:
            raise ModelError(f"{file}: {error}") from error
        if not isinstance(values, dict):
            raise ModelError(f"{file}: not a JSON object")
        return cls(values, file, content=content)

    def error(self, key: str, problem: str) -> ModelError:
        """Return an error that names this file, `key`, and all problems found before."""
        return ModelError(f"{self.file}: {'; '.join([*self._problems, f'{self._path}{key}: {problem}'])}")

    @property
    def values(self) -> dict[str, Any]:
        """A copy of all keys."""
        return dict(self._values)

    def raw(self, key: str) -> Any:
        """Return the value of `key`, None if absent."""
        self._read.add(key)
        return self._values.get(key)

    def fill(self, key: str, value: Any) -> None:
        """Set `key` if it is absent or null."""
        if self._values.get(key) is None:
            self._values[key] = value

    def fill_spelled(self, spelling: Mapping[str, str]) -> None:
        """Set absent keys from the family's names for them; `spelling` has these by the usual ones."""
        for key, spelled in spelling.items():
            self.fill(key, self.raw(spelled))

    def fill_absent(self, **values: Any) -> None:
        """Set those keys that are absent; null is a value of its own."""
        self._values = values | self._values

    def override(self, key: str, value: Any) -> None:
        """Set `key`, because a family reads its value in another way than the file says it."""
        self._values[key] = value

    def enter(self, key: str) -> None:
        """Make the keys of the object at `key` this configuration's own; they precede its others. Raises ModelError."""
        inner = self.raw(key)
        if not isinstance(inner, dict):
            raise self.error(key, f"expected an object, found {inner!r}")
        self._values |= inner

    def first_of(self, *keys: str) -> str:
        """Return the first of several spellings that is present, otherwise the last."""
        return next((key for key in keys if self._values.get(key) is not None), keys[-1])

    def integer(self, key: str, default: int | None = None, at_most: int = MAX_INTEGER) -> int:
        """Return a positive integer. Raises ModelError."""
        value = self.raw(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise self.error(key, f"expected a positive integer, found {value!r}")
        if value > at_most:
            raise self.error(key, f"expected {at_most} at most, found {value!r}")
        return value

    def quotient(self, key: str, divisor: str) -> int:
        """Return the integer `key` divided by the integer `divisor`. Raises ModelError if there is a remainder."""
        whole, parts = self.integer(key), self.integer(divisor)
        if whole % parts:
            raise self.error(divisor, f"expected a divisor of {key} {whole}, found {parts}")
        return whole // parts

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number above 0. Raises ModelError."""
        value = self.raw(key)
        value = default if value is None else value
        if not is_positive(value):
            raise self.error(key, f"expected a number above 0, found {value!r}")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """Return a number, or None if the key is absent or null. Raises ModelError."""
        return None if self.raw(key) is None else self.number(key)

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean. Raises ModelError."""
        value = self.raw(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.error(key, f"expected true or false, found {value!r}")
        return value

    def choice(self, key: str, choices: Mapping[str, T], default: str | None = None) -> T:
        """Return the entry of `choices` for the value of `key`; `finish` refuses an unknown value."""
        value = self.raw(key)
        value = default if value is None else value
        if not isinstance(value, str) or value not in choices:
            self._refuse(key, f"{value!r} is not implemented; known: {', '.join(choices)}")
            return next(iter(choices.values()))
        return choices[value]

    def section(self, key: str) -> Config:
        """Return the object at `key`; `finish` also refuses its unknown keys. Raises ModelError."""
        value = self.raw(key)
        if not isinstance(value, dict):
            raise self.error(key, f"expected an object, found {value!r}")
        self._sections.append(Config(value, self.file, self, key))
        return self._sections[-1]

    def but(self, **changed: Any) -> Config:
        """Return this object with other values; `finish` also refuses its unknown keys."""
        made = Config(self._values | changed, self.file)
        made._problems, made._path = self._problems, self._path
        self._sections.append(made)
        return made

    def pass_over(self, *keys: str) -> None:
        """Accept any value of `keys`, because they have no effect here."""
        self._read.update(keys)

    def require(self, key: str, *allowed: object) -> None:
        """Accept `key` if it is absent, null or one of `allowed`; `finish` refuses other values."""
        value = self.raw(key)
        if value is not None and value not in allowed:
            known = ", ".join(map(repr, allowed)) or "null"
            self._refuse(key, f"{value!r} is not implemented; allowed: {known}")

    def finish(self) -> None:
        """Raise one ModelError for all refused values and all unknown keys."""
        self._refuse_unread()
        if self._problems:
            raise ModelError(f"{self.file}: {'; '.join(self._problems)}")

    def _refuse(self, key: str, problem: str) -> None:
        self._problems.append(f"{self._path}{key}: {problem}")

    def _refuse_unread(self) -> None:
        for key, value in self._values.items():
            if key in self._read or key in _HARMLESS or key.startswith("_") or value is None:
                continue
            if key in _NEUTRAL:
                self.require(key, _NEUTRAL[key])
            elif key in _REPEATED and _REPEATED[key] in self._values:
                self.require(key, self._values[_REPEATED[key]])
            elif key != "layer_types" or not isinstance(value, list) or value != ["full_attention"] * len(value):
                self._problems.append(f"{self._path}{key}: {value!r} is not implemented for this architecture")
        for section in self._sections:
            section._refuse_unread()


def is_positive(value: object) -> TypeGuard[float]:
    """Whether `value` is a number above 0 in the range of a float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max
