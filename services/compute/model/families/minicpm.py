"""MiniCPM 1 and 4: Llama with multipliers on embeddings, residual stream and logits (arXiv:2404.06395)."""

from __future__ import annotations

from dataclasses import replace

from services.compute.model.families.config import Config
from services.compute.model.families.granite import scaled_sums
from services.compute.model.families.llama import base_spec
from services.compute.model.families.naming import Family, standard_refs
from services.compute.model.spec import ModelSpec


def read_spec(config: Config) -> ModelSpec:
    """Read a MiniCPM config.json. Raises ModelError."""
    config.require("sparse_config")
    config.pass_over("pretraining_tp", "mup_denominator")  # used by another program's products, and in training only
    spec = base_spec(config, "minicpm", tied=True, attention_bias=False)
    return replace(
        spec,
        embedding_scale=config.number("scale_emb", 1.0),
        layers=scaled_sums(spec.layers, config.number("scale_depth", 1.0) / spec.n_layers**0.5),
        logit_scale=config.number("dim_model_base", 1.0) / spec.hidden_size,
    )


FAMILY = Family("MiniCPMForCausalLM", "minicpm", read_spec, standard_refs)
