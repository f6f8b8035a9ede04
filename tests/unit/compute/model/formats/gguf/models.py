"""Writes transformers' models as GGUF files, as llama.cpp's converter does, with the names of the `gguf` package."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from torch import Tensor

from tests.unit.compute.model.formats.gguf.stateful import (
    SAME,
    STATEFUL,
    Part,
    StoredOrder,
    is_exact,
    state_parts,
    write_state_config,
)

F32 = gguf.GGMLQuantizationType.F32
Kinds = Callable[[str], gguf.GGMLQuantizationType]  # the type of a matrix by its name in the file
_PAIRED = ("llama", "granite", "smollm3", "granitehybrid")
_ARCH = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}


def plain(_: str) -> gguf.GGMLQuantizationType:
    """Leave matrices unquantized."""
    return F32


def uniform(kind: gguf.GGMLQuantizationType) -> Kinds:
    """All matrices in one type."""
    return lambda _: kind


def write_model(
    model: transformers.PreTrainedModel,
    arch: str,
    file: Path,
    kinds: Kinds = plain,
    tensors: dict[str, np.ndarray] | None = None,
    describe: Callable[[gguf.GGUFWriter], None] = lambda _: None,
    without: tuple[str, ...] = (),
    **extra: Any,
) -> Path:
    """Write `model`, whose matrices become what `kinds` stores of them.

    `tensors`: more of them. `describe` adds more metadata. `extra`, `without`: keys after the architecture's name.
    """
    config = model.config
    writer = gguf.GGUFWriter(str(file), arch)
    _write_config(writer, config, arch)
    describe(writer)
    for key, value in extra.items():
        _add(writer, f"{arch}.{key.replace('__', '.')}", value)
    for key in without:
        del writer.kv_data[0][f"{arch}.{key}"]
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    names = gguf.get_tensor_name_map(_ARCH[arch], config.num_hidden_layers)
    written = set()
    for name, tensor in model.state_dict().items():
        if (name == "lm_head.weight" and config.tie_word_embeddings) or name.endswith((".attn.bias", "inv_freq")):
            continue
        for stored, part, order in _parts(name, tensor, arch, config):
            published = name.replace("model.", "backbone.", 1) if arch.startswith("nemotron_h") else name
            stored = stored or names.get_name(published, (".weight", ".bias"))
            assert stored, f"gguf has no name for {name}"
            assert stored not in written, f"{stored} twice"
            written.add(stored)
            _write(writer, stored, part, order, kinds)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _parts(name: str, tensor: Tensor, arch: str, config: Any) -> list[Part]:
    """The stored tensors of one of the model's; "" for the name that `gguf` has for it."""
    parts = state_parts(name, tensor, arch, config) if arch in STATEFUL else []
    parts = parts or [(stored, part, SAME) for stored, part in _experts(name, tensor)]
    return parts or [("", tensor, _order(name, arch, config))]


def _write(writer: gguf.GGUFWriter, name: str, tensor: Tensor, order: StoredOrder, kinds: Kinds) -> None:
    """Write one tensor, and change it to what is stored."""
    values = order.there(tensor).float().contiguous().numpy()
    kind = F32 if values.ndim == 1 or is_exact(name) else kinds(name)
    if values.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
        kind = F32
    data = gguf.quantize(values, kind)
    writer.add_tensor(name, data, raw_dtype=kind)
    if kind is not F32:
        rounded = torch.from_numpy(gguf.dequantize(data, kind).reshape(values.shape))
        tensor.copy_(order.back(rounded))


def _experts(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """The projections of the experts of a layer, which transformers 5 keeps in two tensors; [] for other tensors."""
    if ".experts." not in name:
        return []
    prefix = f"blk.{name.split('.')[2]}.ffn_"
    if name.endswith("down_proj"):
        return [(f"{prefix}down_exps.weight", tensor)]
    if name.endswith(".up_proj"):
        return [(f"{prefix}up_exps.weight", tensor)]
    gate, up = tensor.chunk(2, dim=1)
    return [(f"{prefix}gate_exps.weight", gate), (f"{prefix}up_exps.weight", up)]


def _order(name: str, arch: str, config: Any) -> StoredOrder:
    if arch in _PAIRED and name.rpartition(".")[0].endswith(("q_proj", "k_proj")):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        return StoredOrder(lambda x: _paired(x, heads), lambda x: _halved(x, heads))
    if arch.startswith(("gemma", "qwen3next", "qwen35")) and name.endswith("norm.weight") and "linear" not in name:
        return StoredOrder(lambda x: x + 1, lambda x: x - 1)
    if arch == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        return StoredOrder(lambda x: x.t(), lambda x: x.t())
    if arch == "gptneox" and "query_key_value" in name:
        heads, size = config.num_attention_heads, config.hidden_size // config.num_attention_heads

        def there(x: Tensor) -> Tensor:
            return x.view(heads, 3, size, *x.shape[1:]).transpose(0, 1).reshape(x.shape)

        def back(x: Tensor) -> Tensor:
            return x.view(3, heads, size, *x.shape[1:]).transpose(0, 1).reshape(x.shape)

        return StoredOrder(there, back)
    return SAME


def _paired(x: Tensor, heads: int) -> Tensor:
    return x.reshape(heads, 2, x.shape[0] // heads // 2, *x.shape[1:]).transpose(1, 2).reshape(x.shape)


def _halved(x: Tensor, heads: int) -> Tensor:
    return x.reshape(heads, x.shape[0] // heads // 2, 2, *x.shape[1:]).transpose(1, 2).reshape(x.shape)


def _write_config(writer: gguf.GGUFWriter, config: Any, arch: str) -> None:
    if arch in STATEFUL:
        write_state_config(writer, config, arch)
        return
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_feed_forward_length(getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if arch in ("gpt2", "gptneox"):
        writer.add_layer_norm_eps(config.layer_norm_epsilon if arch == "gpt2" else config.layer_norm_eps)
    else:
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if arch == "gptneox":
        writer.add_parallel_residual(config.use_parallel_residual)
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    if rope:
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
        if arch != "gptneox":
            writer.add_rope_freq_base(rope["rope_theta"])


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
        return
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    kinds[type(value)](key, value)


def random_model(config: transformers.PretrainedConfig, seed: int = 0) -> transformers.PreTrainedModel:
    """A model whose every tensor is random, biases and norms included."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            noise = torch.randn(tensor.shape)
            tensor.copy_(noise * 0.15 if tensor.dim() > 1 else noise * 0.3 + (1.0 if "weight" in name else 0.0))
    return model
