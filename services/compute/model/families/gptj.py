"""GPT-J: attention and MLP read the same norm, an interleaved rope on the first elements of a head."""

from __future__ import annotations

from dataclasses import replace

from services.compute.model.families.config import Config
from services.compute.model.families.fused import paired
from services.compute.model.families.gpt2 import body_refs
from services.compute.model.families.naming import UNUSED, Family, LayerNames, Refs
from services.compute.model.families.plain import GPT_SPELLING, plain_spec
from services.compute.model.spec import ModelSpec, RopeSpec

_NAMES = LayerNames(
    q="attn.q_proj",
    k="attn.k_proj",
    v="attn.v_proj",
    o="attn.out_proj",
    up="mlp.fc_in",
    down="mlp.fc_out",
    attn_norm="ln_1",
)


def read_spec(config: Config) -> ModelSpec:
    """Read a GPT-J config.json. Raises ModelError."""
    config.require("rotary", True)
    config.pass_over("scale_attn_weights")  # it always scales
    head_dim, rotary_dim = config.quotient("n_embd", "n_head"), config.integer("rotary_dim", 64)
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise config.error(
            "rotary_dim", f"expected an even number up to n_embd / n_head {head_dim}, found {rotary_dim}"
        )
    rope = RopeSpec(10_000.0, rotary_dim)
    spec = plain_spec(config, "gptj", GPT_SPELLING, activation="gelu_new", tied=False, rope=rope)
    return replace(spec, parallel_residual=True, shared_norm=True, qkv_bias=False, o_bias=False, head_bias=True)


def refs(spec: ModelSpec) -> Refs:
    """Name GPT-J's tensors."""
    return paired(spec, body_refs(spec, _NAMES))


FAMILY = Family(
    "GPTJForCausalLM",
    "gptj",
    read_spec,
    refs,
    (*UNUSED, "*.attn.bias", "*.attn.masked_bias"),
    optional_prefix="transformer.",
    spelling=GPT_SPELLING,
)
