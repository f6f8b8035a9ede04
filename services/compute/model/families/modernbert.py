"""ModernBERT: an encoder with ropes, gated MLPs, and windows on two of three layers."""

from __future__ import annotations

import math
from dataclasses import replace

from services.compute.model.families.classifying import first_state, read_labels
from services.compute.model.families.config import MAX_LAYERS, Config
from services.compute.model.families.fused import concatenated, in_layers
from services.compute.model.families.llama import ACTIVATIONS, read_dtype, read_eos
from services.compute.model.families.naming import UNUSED, Family, LayerNames, Refs, standard_refs
from services.compute.model.families.rope import read_ropes
from services.compute.model.families.windows import FULL, SLIDING, read_layer_types
from services.compute.model.spec import Classifier, HeadActivation, HeadLayer, LayerSpec, ModelSpec, RopeSpec
from services.compute.ranks.config import PoolingKind

_NAMES = LayerNames(o="attn.Wo", down="mlp.Wo", attn_norm="attn_norm", mlp_norm="mlp_norm")
_SPELLING = {"rms_norm_eps": "norm_eps", "hidden_act": "hidden_activation"}
_POOLINGS: dict[str, PoolingKind] = {"cls": "cls", "mean": "mean"}
_ACTIVATIONS: dict[str, HeadActivation] = {"gelu": "gelu", "relu": "relu", "silu": "silu", "tanh": "tanh"}


def read_spec(config: Config) -> ModelSpec:
    """Read a ModernBERT config.json. Raises ModelError."""
    n_layers = config.integer("num_hidden_layers", at_most=MAX_LAYERS)
    head_dim = config.quotient("hidden_size", "num_attention_heads")
    config.pass_over("initializer_cutoff_factor", "embedding_dropout", "mlp_dropout", "deterministic_flash_attn")
    config.pass_over("sparse_prediction", "sparse_pred_ignore_index", "decoder_bias", "reference_compile")
    config.pass_over("repad_logits_with_grad", "layer_norm_eps", "position_embedding_type", "tie_word_embeddings")
    config.pass_over("classifier_pooling", "classifier_bias", "classifier_activation")
    every = config.integer("global_attn_every_n_layers", 3)
    kinds = read_layer_types(config, n_layers, [SLIDING if index % every else FULL for index in range(n_layers)])
    window = config.integer("local_attention", 128) // 2 + 1  # width of one side, the row itself included
    config.pass_over("sliding_window")  # the same number, in some files
    ropes = _ropes(config, head_dim)
    bias, heads = config.flag("attention_bias", False), config.integer("num_attention_heads")
    return ModelSpec(
        family="modernbert",
        dtype=read_dtype(config),
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        ffn_size=config.integer("intermediate_size"),
        n_heads=heads,
        n_kv_heads=heads,
        head_dim=head_dim,
        max_positions=config.integer("max_position_embeddings", 8192),
        layers=tuple(LayerSpec(window if kind == SLIDING else None, ropes[kind]) for kind in kinds),
        bidirectional=True,
        norm="layer",
        norm_eps=config.number("norm_eps", 1e-5),
        norm_bias=config.flag("norm_bias", False),
        embed_norm=True,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=config.flag("mlp_bias", False),
        activation=config.choice("hidden_activation", ACTIVATIONS, "gelu"),
        attention_scale=1 / math.sqrt(head_dim),
        tied=True,
        generates=False,
        eos_token_ids=read_eos(config),
    )


def _ropes(config: Config, head_dim: int) -> dict[str, RopeSpec]:
    """Return the rope of both kinds of layers; transformers 4 has a theta for each."""
    thetas = {FULL: config.number("global_rope_theta", 160_000.0), SLIDING: config.number("local_rope_theta", 10_000.0)}
    ropes = read_ropes(config, head_dim) if config.raw("rope_parameters") else {}
    if set(ropes) - {FULL, SLIDING}:
        raise config.error("rope_parameters", f"expected {FULL!r} and {SLIDING!r}, found {sorted(ropes)}")
    return {kind: ropes.get(kind) or RopeSpec(theta, head_dim) for kind, theta in thetas.items()}


def refs(spec: ModelSpec) -> Refs:
    """Name ModernBERT's tensors: q, k and v are one tensor, gate and up another, and the first layer has no norm."""
    body = "model.embeddings."
    refs = standard_refs(spec, _NAMES, embed=f"{body}tok_embeddings", embed_norm=f"{body}norm", norm="model.final_norm")
    qkv, halves = dict.fromkeys("qkv", spec.hidden_size), dict.fromkeys(("gate", "up"), spec.ffn_size)

    def fused(index: int) -> Refs:
        attention = concatenated(f"model.layers.{index}.attn.Wqkv", qkv, bias=spec.qkv_bias)
        return attention | concatenated(f"model.layers.{index}.mlp.Wi", halves, bias=spec.mlp_bias)

    refs |= in_layers(spec, fused)
    return {key: ref for key, ref in refs.items() if not key.startswith("layers.0.attn_norm")}


def classifier(config: Config, spec: ModelSpec) -> Classifier:
    """Return the head over the state of the first token, or over the mean of all. Raises ModelError."""
    dense = HeadLayer(
        "head.dense",
        spec.hidden_size,
        bias=config.flag("classifier_bias", False),
        activation=config.choice("classifier_activation", _ACTIVATIONS, "gelu"),
        norm="head.norm",
    )
    head = first_state(config, dense, HeadLayer("classifier", len(read_labels(config))))
    return replace(head, pooling=config.choice("classifier_pooling", _POOLINGS, "cls"))


FAMILY = Family(
    "ModernBertModel",
    "modernbert",
    read_spec,
    refs,
    (*UNUSED, "head.*", "decoder.*"),
    aliases=("ModernBertForMaskedLM",),
    classifying="ModernBertForSequenceClassification",
    classifier=classifier,
    spelling=_SPELLING,
)
