"""OLMo 2: norms after attention and MLP only, q and k normalised over all heads. OLMo 3: windows and two ropes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from services.compute.model.families.config import Config
from services.compute.model.families.llama import base_spec
from services.compute.model.families.naming import Family, LayerNames, standard_refs
from services.compute.model.families.rope import read_ropes
from services.compute.model.families.windows import FULL, SLIDING, read_layer_types, with_windows
from services.compute.model.spec import LayerSpec, ModelSpec, RopeSpec

_NAMES = LayerNames(attn_post_norm="post_attention_layernorm", mlp_post_norm="post_feedforward_layernorm")


def read_spec(config: Config) -> ModelSpec:
    """Read an OLMo 2 config.json. Raises ModelError."""
    spec = base_spec(config, "olmo2", norm_eps=1e-5, attention_bias=False)
    return replace(spec, pre_norm=False, post_norm=True, qk_norm="full")


def read_olmo3(config: Config) -> ModelSpec:
    """Read an OLMo 3 config.json: its layers with a window have a rope that is not scaled. Raises ModelError."""
    n_layers, ropes = config.integer("num_hidden_layers"), _olmo3_ropes(config)
    spec = base_spec(config, "olmo3", norm_eps=1e-5, ropes={"": ropes[FULL]}, attention_bias=False)
    default = [SLIDING if (index + 1) % 4 else FULL for index in range(n_layers)]
    kinds = read_layer_types(config, n_layers, default)
    spec = replace(spec, layers=tuple(LayerSpec(rope=ropes[kind]) for kind in kinds))
    layers = with_windows(config, spec, kinds)
    return replace(spec, layers=layers, pre_norm=False, post_norm=True, qk_norm="full")


def _olmo3_ropes(config: Config) -> dict[str, RopeSpec]:
    """Return the rope of both kinds of layers."""
    ropes = read_ropes(config, config.quotient("hidden_size", "num_attention_heads"), default_theta=500_000.0)
    if "" in ropes:
        return {FULL: ropes[""], SLIDING: RopeSpec(ropes[""].theta, ropes[""].rotary_dim)}
    if set(ropes) != {FULL, SLIDING}:
        raise config.error("rope_parameters", f"expected {FULL!r} and {SLIDING!r}, found {sorted(ropes)}")
    return ropes


refs = partial(standard_refs, names=_NAMES)
OLMO2 = Family("Olmo2ForCausalLM", "olmo2", read_spec, refs)
OLMO3 = Family("Olmo3ForCausalLM", "olmo3", read_olmo3, refs)
