"""Shapes of a model's tensors by its config.json, and the keys that determine them. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass

from services.compute.model.families.config import Config
from services.compute.model.families.naming import Family
from services.compute.model.mixers import DeltaNet, Lightning, Mamba, Mixer, ShortConv
from services.compute.model.spec import LatentSpec, ModelSpec

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")  # spellings of families


@dataclass(frozen=True, slots=True)
class Size:
    """One dimension of a logical tensor, and the keys of config.json that determine it."""

    value: int
    keys: tuple[str, ...]


Shape = tuple[Size, ...]


def logical_shape(key: str, shapes: dict[str, Shape]) -> Shape:
    """Return the shape of the tensor with a logical key from the result of `read_shapes`."""
    if key.endswith(".bias"):
        return logical_shape(key.removesuffix(".bias"), shapes)[:1]
    name = key.rpartition(".")[2]
    name = next((f"{kind}.{name}" for kind in ("experts", "shared") if f".{kind}." in key), name)
    return shapes[name] if name in shapes else shapes["norm"]


def read_shapes(config: Config, family: Family, spec: ModelSpec) -> dict[str, Shape]:
    """Return the shape of every kind of tensor by the last part of its key; norms over hidden_size are "norm"."""
    keys = _Keys(config, family)
    hidden, ffn = keys.size(spec.hidden_size, "hidden_size"), keys.size(spec.ffn_size, "intermediate_size")
    q = keys.size(spec.n_heads * spec.head_dim, "num_attention_heads", "head_dim")
    kv = keys.size(spec.n_kv_heads * spec.head_dim, "num_key_value_heads", "head_dim")
    read = keys.size(spec.attention_width, "hidden_size")
    vocabulary = keys.size(spec.vocab_size, "vocab_size")
    per_head = keys.size(spec.head_dim, "head_dim")
    shapes = {
        "embed": (vocabulary, hidden),
        "head": (vocabulary, hidden),
        "positions": (keys.size(spec.max_positions, "max_position_embeddings"), hidden),
        "norm": (hidden,),
        "q": (q, read),
        "k": (kv, read),
        "v": (kv, read),
        "o": (hidden, q),
        "q_norm": (q,),
        "k_norm": (kv,),
        "gate": (ffn, hidden),
        "up": (ffn, hidden),
        "down": (hidden, ffn),
    }
    if spec.qk_norm == "head":
        shapes |= dict.fromkeys(("q_norm", "k_norm"), (per_head,))
    if spec.n_token_types:
        shapes["token_types"] = (keys.size(spec.n_token_types, "type_vocab_size"), hidden)
    if spec.classifier is not None:
        n_in = hidden
        for index, layer in enumerate(spec.classifier.layers):
            n_out = hidden if layer.n_out == spec.hidden_size else keys.size(layer.n_out, "id2label", "num_labels")
            shapes |= {f"classifier{index}": (n_out, n_in), f"classifier{index}_norm": (n_out,)}
            n_in = n_out
    if spec.latent is not None:
        shapes |= _latent_shapes(keys, spec, spec.latent, hidden)
    shapes |= dict.fromkeys(("alpha_p", "alpha_n", "beta"), (Size(1, ()),))
    shapes["attention_gate"] = (q, hidden)
    shapes |= {"o_norm": (q,), "down_norm": (ffn,), "sinks": (keys.size(spec.n_heads, "num_attention_heads"),)}
    for mixer in dict.fromkeys(layer.mixer for layer in spec.layers if layer.mixer is not None):
        shapes |= _mixer_shapes(keys, mixer, hidden)
    if (block := next((layer.block for layer in spec.layers if layer.block is not None), None)) is not None:
        rank = keys.size(block.rank, "adapter_rank")
        outputs = {"q": q, "k": kv, "v": kv, "gate": ffn, "up": ffn}
        shapes |= {f"{part}_second": (size, rank) for part, size in outputs.items()}
        shapes |= dict.fromkeys(("q_first", "k_first", "v_first"), (rank, read))
        shapes |= {"mlp_first": (rank, hidden), "block_norm": (read,), "block_out": (hidden, hidden)}
    moe = next((layer.moe for layer in spec.layers if layer.moe is not None), None)
    if moe is not None:
        ffn = keys.size(moe.ffn_size, "moe_intermediate_size")
        n_experts = keys.size(moe.n_experts, *EXPERTS)
        shapes["router"], shapes["router_correction"] = (n_experts, hidden), (n_experts,)
        shapes |= {"experts.gate": (ffn, hidden), "experts.up": (ffn, hidden), "experts.down": (hidden, ffn)}
        shared = keys.size(moe.shared_size, "shared_expert_intermediate_size", "n_shared_experts")
        shapes |= {"shared.gate": (shared, hidden), "shared.up": (shared, hidden), "shared.down": (hidden, shared)}
        shapes["shared_gate"] = Size(1, ()), hidden
    return shapes


def _mixer_shapes(keys: _Keys, mixer: Mixer, hidden: Size) -> dict[str, Shape]:
    if isinstance(mixer, ShortConv):
        size = keys.size(mixer.size, "hidden_size")
        products = dict.fromkeys(("conv_b", "conv_c", "conv_x"), (size, hidden))
        return {**products, "conv_out": (hidden, size), "filter": (size, keys.size(mixer.kernel, "conv_L_cache"))}
    if isinstance(mixer, DeltaNet):
        return _delta_shapes(keys, mixer, hidden)
    if isinstance(mixer, Mamba):
        return _mamba_shapes(keys, mixer, hidden)
    if isinstance(mixer, Lightning):
        size = keys.size(mixer.size, "num_attention_heads", "head_dim")
        products = {f"lightning_{part}": (size, hidden) for part in ("q", "k", "v", "gate")}
        return {**products, "lightning_norm": (size,), "lightning_out": (hidden, size)}
    heads, kernel = keys.size(mixer.n_heads, "mamba_n_heads"), keys.size(mixer.kernel, "mamba_d_conv")
    size = keys.size(mixer.size, "mamba_n_heads", "mamba_d_head")
    states = keys.size(mixer.n_groups * mixer.n_states, "mamba_n_groups", "mamba_d_state")
    sizes = {"z": size, "x": size, "b": states, "c": states, "dt": heads}
    return {
        **{f"ssm_{part}": (n, hidden) for part, n in sizes.items()},
        **{f"filter_{part}": (sizes[part], kernel) for part in "xbc"},
        **dict.fromkeys(("ssm_a", "ssm_step", "ssm_skip"), (heads,)),
        "ssm_norm": (size,),
        "ssm_out": (hidden, size),
    }


def _mamba_shapes(keys: _Keys, mixer: Mamba, hidden: Size) -> dict[str, Shape]:
    size, states = keys.size(mixer.size, "mamba_expand"), keys.size(mixer.n_states, "mamba_d_state")
    rank, kernel = keys.size(mixer.step_rank, "mamba_dt_rank"), keys.size(mixer.kernel, "mamba_d_conv")
    select = keys.size(mixer.step_rank + 2 * mixer.n_states, "mamba_dt_rank", "mamba_d_state")
    return {
        **dict.fromkeys(("ssm_x", "ssm_z"), (size, hidden)),
        "ssm_select": (select, size),
        "ssm_dt": (size, rank),
        "ssm_skip": (size,),
        "ssm_out": (hidden, size),
        "filter": (size, kernel),
        "rates": (size, states),
        "step_norm": (rank,),
        **dict.fromkeys(("b_norm", "c_norm"), (states,)),
    }


def _delta_shapes(keys: _Keys, mixer: DeltaNet, hidden: Size) -> dict[str, Shape]:
    n_keys, n_values = "linear_num_key_heads", "linear_num_value_heads"
    of_keys = keys.size(mixer.keys, n_keys, "linear_key_head_dim")
    of_values = keys.size(mixer.values, n_values, "linear_value_head_dim")
    heads, kernel = keys.size(mixer.n_value_heads, n_values), keys.size(mixer.kernel, "linear_conv_kernel_dim")
    sizes = {"q": of_keys, "k": of_keys, "v": of_values, "z": of_values, "rate": heads, "dt": heads}
    shapes: dict[str, Shape] = {f"delta_{part}": (n, hidden) for part, n in sizes.items()}
    if mixer.rank:
        few = keys.size(mixer.rank, "linear_key_head_dim")
        shapes |= {"delta_z": (of_values, few), "delta_dt": (of_keys, few)}
        shapes |= dict.fromkeys(("delta_z_few", "delta_dt_few"), (few, hidden))
    return {
        **shapes,
        **{f"filter_{part}": (sizes[part], kernel) for part in "qkv"},
        "delta_a": (heads,),
        "delta_step": (of_keys if mixer.rank else heads,),
        "delta_norm": (keys.size(mixer.value_dim, "linear_value_head_dim"),),
        "delta_out": (hidden, of_values),
    }


def _latent_shapes(keys: _Keys, spec: ModelSpec, latent: LatentSpec, hidden: Size) -> dict[str, Shape]:
    rank, query_rank = keys.size(latent.rank, "kv_lora_rank"), keys.size(latent.query_rank, "q_lora_rank")
    heads, nope, rope, value = "num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"
    queries = keys.size(spec.n_heads * latent.query_dim, heads, nope, rope)
    return {
        "q": (queries, query_rank if latent.query_rank else hidden),
        "q_latent": (query_rank, hidden),
        "q_latent_norm": (query_rank,),
        "kv_latent": (keys.size(latent.rank + latent.rope_dim, "kv_lora_rank", rope), hidden),
        "kv_latent_norm": (rank,),
        "kv_heads": (keys.size(spec.n_heads * latent.expanded_dim, heads, nope, value), rank),
        "o": (hidden, keys.size(spec.n_heads * latent.value_dim, heads, value)),
    }


# Keys from which a size is derived if its own key is absent.
_FOLLOWS = {
    "head_dim": ("hidden_size", "num_attention_heads"),
    "num_key_value_heads": ("num_attention_heads",),
    "intermediate_size": ("hidden_size",),
    "moe_intermediate_size": ("intermediate_size",),
}


class _Keys:
    """Translates keys to the family's spelling in one config.json."""

    def __init__(self, config: Config, family: Family) -> None:
        self._config, self._family = config, family

    def size(self, value: int, *names: str) -> Size:
        """Return a size with the keys `names` that determine it, or the keys that replace absent ones."""
        keys = dict.fromkeys(key for name in names for key in self._spelled(name))
        return Size(value, tuple(keys))

    def _spelled(self, name: str) -> tuple[str, ...]:
        key = self._family.spelling.get(name, name)
        if self._config.raw(key) is not None:
            return (key,)
        return tuple(key for other in _FOLLOWS.get(name, ()) for key in self._spelled(other))
