"""Writes the layers with a state of transformers' models as llama.cpp's converter does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gguf
import torch
from torch import Tensor

STATEFUL = (
    *("lfm2", "lfm2moe", "granitehybrid", "falcon-h1", "nemotron_h", "jamba", "mamba", "mamba2"),
    *("nemotron_h_moe", "qwen3next", "qwen35", "qwen35moe"),
)
_ATTENTION = ("attention", "full_attention")
_COLUMNS = ("granitehybrid", "falcon-h1", "nemotron_h", "nemotron_h_moe", "mamba2")  # numbers of heads are rows of one
_NEVER_QUANTIZED = ("ssm_a", "ssm_d", "norm.weight", "conv1d.weight", "conv.weight")


@dataclass(frozen=True)
class StoredOrder:
    """How a tensor of the hub is stored in a file, and back."""

    there: Callable[[Tensor], Tensor]
    back: Callable[[Tensor], Tensor]


SAME = StoredOrder(lambda x: x, lambda x: x)
_RATE = StoredOrder(lambda x: -torch.exp(x), lambda x: torch.log(-x))
Part = tuple[str, Tensor, StoredOrder]  # the name in a file, a view of the model's tensor, and how it is stored


def is_exact(name: str) -> bool:
    """Whether llama.cpp never quantizes the tensor with this name in a file."""
    return name.endswith(_NEVER_QUANTIZED)


def state_parts(name: str, tensor: Tensor, arch: str, config: Any) -> list[Part]:
    """The stored tensors of one of the model's that its layers with a state or its arrangement need; [] for others."""
    layer = name.removeprefix("model.").removeprefix("backbone.").removeprefix("layers.").partition(".")[0]
    prefix = f"blk.{layer}."
    if ".shared_mlp." in name:
        return _shared(prefix, name, tensor, config)
    if arch == "falcon-h1" and (factor := _factor(name, config)) is not None:
        stored = gguf.get_tensor_name_map(_arch(arch), config.num_hidden_layers).get_name(name, (".weight", ".bias"))
        assert stored is not None
        return [(stored, tensor, StoredOrder(lambda x: x * factor, lambda x: x / factor))]
    if name.endswith("in_proj_qkvz.weight"):
        return _without_key_heads(prefix, tensor, config)
    if arch.startswith("qwen35") and ".linear_attn." in name and "norm" not in name:
        return _tiled(prefix, name, tensor, config)
    if name.endswith((".A_log", ".D")):
        stored, order = (f"{prefix}ssm_a", _RATE) if name.endswith(".A_log") else (f"{prefix}ssm_d", SAME)
        return [(stored, tensor.unsqueeze(-1) if arch in _COLUMNS else tensor, order)]
    if name.endswith(("conv1d.weight", "conv.conv.weight")):
        tensor = tensor.squeeze(1)
    if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        tensor = tensor.view(_n_groups(config), -1)
    return [(prefix + stored, tensor, SAME) for end, stored in _NAMES.items() if name.endswith(end)]


_NAMES = {  # those that `gguf` has for other names of the hub
    ".expert_bias": "exp_probs_b.bias",
    ".e_score_correction_bias": "exp_probs_b.bias",
    ".block_sparse_moe.router.weight": "ffn_gate_inp.weight",
    ".dt_bias": "ssm_dt.bias",
    "conv1d.weight": "ssm_conv1d.weight",
    "conv.conv.weight": "shortconv.conv.weight",
    "mamba.norm.weight": "ssm_norm.weight",
    "mixer.norm.weight": "ssm_norm.weight",
}


def _shared(prefix: str, name: str, tensor: Tensor, config: Any) -> list[Part]:
    """Granite's shared MLP, or the only one."""
    end = "_shexp.weight" if config.num_local_experts else ".weight"
    if "output_linear" in name:
        return [(f"{prefix}ffn_down{end}", tensor, SAME)]
    gate, up = tensor.chunk(2)
    return [(f"{prefix}ffn_gate{end}", gate, SAME), (f"{prefix}ffn_up{end}", up, SAME)]


def _arch(name: str) -> gguf.MODEL_ARCH:
    return next(arch for arch, spelled in gguf.MODEL_ARCH_NAMES.items() if spelled == name)


def _first(config: Any, *names: str) -> Any:
    return next(getattr(config, name) for name in names if hasattr(config, name))


def _n_heads(config: Any) -> int:
    return int(getattr(config, "mamba_n_heads", None) or getattr(config, "mamba_num_heads", None) or config.num_heads)


def _n_groups(config: Any) -> int:
    return int(_first(config, "mamba_n_groups", "n_groups"))


def _factor(name: str, config: Any) -> float | Tensor | None:
    """The factor of Falcon-H1's tensor in a file."""
    if name.endswith("mamba.in_proj.weight"):
        states = config.mamba_n_groups * config.mamba_d_state
        sizes = torch.tensor([config.mamba_d_ssm, config.mamba_d_ssm, states, states, config.mamba_n_heads])
        factors = torch.tensor(config.ssm_multipliers) * config.ssm_in_multiplier
        return factors.repeat_interleave(sizes).unsqueeze(-1)
    gate, down = config.mlp_multipliers
    factors = {
        "q_proj": config.attention_in_multiplier,
        "k_proj": config.attention_in_multiplier * config.key_multiplier,
        "v_proj": config.attention_in_multiplier,
        "o_proj": config.attention_out_multiplier,
        "mamba.out_proj": config.ssm_out_multiplier,
        "gate_proj": gate,
        "down_proj": down,
        "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }
    return next((factor for part, factor in factors.items() if f"{part}." in name), None)


def _without_key_heads(prefix: str, tensor: Tensor, config: Any) -> list[Part]:
    """Qwen 3 Next's q, k, v and z, each of all heads, of which the hub keeps the parts of a key head together."""
    heads, group = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    key, value = config.linear_key_head_dim, group * config.linear_value_head_dim
    q, k, v, z = torch.split(tensor.view(heads, -1, tensor.shape[1]), [key, key, value, value], dim=1)
    qkv = torch.cat([part.flatten(0, 1) for part in (q, k, v)])

    def back(_: Tensor) -> Tensor:
        raise NotImplementedError("this tensor is written unquantized")

    return [
        (f"{prefix}attn_qkv.weight", qkv, StoredOrder(lambda x: x, back)),
        (f"{prefix}attn_gate.weight", z, StoredOrder(lambda x: x.flatten(0, 1), lambda x: x.view(z.shape))),
    ]


def _tiled(prefix: str, name: str, tensor: Tensor, config: Any) -> list[Part]:
    """A tensor of Qwen 3.5: the first value head of each key head, then the second one of each, and so on."""
    heads, group = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    end, dim = name.partition(".linear_attn.")[2], 1 if "out_proj" in name else 0
    start = 2 * heads * config.linear_key_head_dim if "qkv" in end or "conv1d" in end else 0

    def turn(x: Tensor, first: int, second: int) -> Tensor:
        before, values = x.narrow(dim, 0, start), x.narrow(dim, start, x.shape[dim] - start)
        heads_of = values.unflatten(dim, (first, second, -1)).transpose(dim, dim + 1)
        return torch.cat((before, heads_of.flatten(dim, dim + 2)), dim)

    def there(x: Tensor) -> Tensor:
        return turn(-torch.exp(x) if end == "A_log" else x, heads, group)

    tensor = tensor.squeeze(1) if "conv1d" in end else tensor
    return [(f"{prefix}{_TILED[end]}", tensor, StoredOrder(there, lambda x: turn(x, group, heads)))]


_TILED = {
    "in_proj_qkv.weight": "attn_qkv.weight",
    "in_proj_z.weight": "attn_gate.weight",
    "in_proj_a.weight": "ssm_alpha.weight",
    "in_proj_b.weight": "ssm_beta.weight",
    "out_proj.weight": "ssm_out.weight",
    "conv1d.weight": "ssm_conv1d.weight",
    "A_log": "ssm_a",
    "dt_bias": "ssm_dt.bias",
}


def write_state_config(writer: gguf.GGUFWriter, config: Any, arch: str) -> None:
    """Add the keys that the converter writes for a model with states."""
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_layer_norm_rms_eps(_first(config, "rms_norm_eps", "norm_eps", "layer_norm_epsilon"))
    if arch in ("mamba", "mamba2"):
        writer.add_context_length(2**20)
        writer.add_feed_forward_length(0)
        writer.add_head_count(0)
    else:
        _write_attention(writer, config, arch)
    if arch in ("lfm2", "lfm2moe"):
        writer.add_shortconv_l_cache(config.conv_L_cache)
    elif arch.startswith("qwen3"):
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
    else:
        _write_state_space(writer, config, arch)
    _write_experts(writer, config, arch)


def _write_state_space(writer: gguf.GGUFWriter, config: Any, arch: str) -> None:
    writer.add_ssm_conv_kernel(_first(config, "mamba_d_conv", "conv_kernel"))
    writer.add_ssm_state_size(_first(config, "mamba_d_state", "ssm_state_size", "state_size"))
    if arch in ("mamba", "jamba"):
        writer.add_ssm_inner_size(_first(config, "mamba_expand", "expand") * config.hidden_size)
        writer.add_ssm_time_step_rank(_first(config, "mamba_dt_rank", "time_step_rank"))
        if arch == "mamba":
            writer.add_ssm_dt_b_c_rms(config.model_type == "falcon_mamba")
        return
    writer.add_ssm_group_count(_n_groups(config))
    writer.add_ssm_time_step_rank(_n_heads(config))
    writer.add_ssm_inner_size(_n_heads(config) * _first(config, "mamba_d_head", "mamba_head_dim", "head_dim"))


def _write_attention(writer: gguf.GGUFWriter, config: Any, arch: str) -> None:
    kinds = getattr(config, "layers_block_type", None) or config.layer_types
    heads = config.num_key_value_heads
    of_layers = [heads if kind in _ATTENTION else 0 for kind in kinds]
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(heads if arch == "falcon-h1" or arch.startswith("qwen3") else of_layers)
    writer.add_context_length(2**20 if arch == "granitehybrid" else config.max_position_embeddings)
    ffn_size = getattr(config, "intermediate_size", None)
    if arch == "nemotron_h":
        writer.add_feed_forward_length([ffn_size if kind == "mlp" else 0 for kind in kinds])
    elif arch == "nemotron_h_moe":
        writer.add_feed_forward_length([config.moe_intermediate_size if kind == "moe" else 0 for kind in kinds])
    elif ffn_size is not None:
        alone = arch == "granitehybrid" and not config.num_local_experts
        writer.add_feed_forward_length(config.shared_intermediate_size if alone else ffn_size)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if arch.startswith(("nemotron_h", "qwen3")) or arch == "falcon-h1":
        writer.add_key_length(head)
        writer.add_value_length(head)
    rope = getattr(config, "rope_parameters", None)
    if rope and arch not in ("jamba", "nemotron_h", "nemotron_h_moe"):
        writer.add_rope_freq_base(rope["rope_theta"])
    if arch.startswith("qwen3"):
        writer.add_rope_dimension_count(int(head * rope["partial_rotary_factor"]))
        if arch.startswith("qwen35"):
            writer.add_rope_dimension_sections([2, 1, 1, 0])
        writer.add_full_attention_interval(next(index for index, kind in enumerate(kinds, 1) if kind in _ATTENTION))
    if arch == "granitehybrid":
        writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)


def _write_experts(writer: gguf.GGUFWriter, config: Any, arch: str) -> None:
    n_experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", 0)
    if not n_experts or arch == "nemotron_h":
        return
    writer.add_expert_count(n_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if arch == "lfm2moe":
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if arch == "granitehybrid":
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    if arch == "nemotron_h_moe":
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
    if arch in ("lfm2moe", "nemotron_h_moe", "qwen3next", "qwen35moe"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if arch in ("qwen3next", "qwen35moe"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
