"""BERT: an encoder with learned positions and two kinds of text, whose norms follow the sums."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from services.compute.model.families.classifying import first_state, read_labels
from services.compute.model.families.config import Config
from services.compute.model.families.naming import UNUSED, Family, LayerNames, Refs, TensorRef, standard_refs
from services.compute.model.families.plain import plain_spec
from services.compute.model.spec import Classifier, HeadLayer, ModelSpec

_NAMES = LayerNames(
    q="attention.self.query",
    k="attention.self.key",
    v="attention.self.value",
    o="attention.output.dense",
    up="intermediate.dense",
    down="output.dense",
    attn_post_norm="attention.output.LayerNorm",
    mlp_post_norm="output.LayerNorm",
)
# Heads of pre-training, the pooler that only classifiers use, and a table of numbers from 0 on.
UNREAD = (*UNUSED, "*pooler.*", "cls.*", "lm_head.*", "*embeddings.position_ids")


def encoder_spec(config: Config, family: str) -> ModelSpec:
    """Read the keys that BERT and the encoders that followed it share. Raises ModelError."""
    config.require("position_embedding_type", "absolute")
    config.require("is_decoder", False)
    config.pass_over("directionality", "layer_norm_type", "embedding_size")
    config.pass_over(*(key for key in config.values if key.startswith("pooler_")))
    config.fill("layer_norm_eps", 1e-12)
    config.fill("max_position_embeddings", 512)
    return replace(
        plain_spec(config, family, {}, activation="gelu"),
        bidirectional=True,
        pre_norm=False,
        post_norm=True,
        sum_norm=True,
        final_norm=False,
        embed_norm=True,
        learned_positions=True,
        n_token_types=config.integer("type_vocab_size", 2),
        tied=True,
        generates=False,
    )


def encoder_refs(spec: ModelSpec, prefix: str) -> Refs:
    """Name the tensors of an encoder whose names begin with `prefix`."""
    body = f"{prefix}embeddings."
    refs = standard_refs(
        spec,
        _NAMES,
        prefix=f"{prefix}encoder.layer.",
        embed=f"{body}word_embeddings",
        embed_norm=f"{body}LayerNorm",
    )
    refs["positions"] = TensorRef(f"{body}position_embeddings.weight")
    refs["token_types"] = TensorRef(f"{body}token_type_embeddings.weight")
    return refs


def read_spec(config: Config) -> ModelSpec:
    """Read a BERT config.json. Raises ModelError."""
    return encoder_spec(config, "bert")


def classifier(config: Config, spec: ModelSpec) -> Classifier:
    """Return the head over the pooler's state of the first token. Raises ModelError."""
    pooler = HeadLayer("bert.pooler.dense", spec.hidden_size, activation="tanh")
    return first_state(config, pooler, HeadLayer("classifier", len(read_labels(config))))


FAMILY = Family(
    "BertModel",
    "bert",
    read_spec,
    partial(encoder_refs, prefix="bert."),
    UNREAD,
    optional_prefix="bert.",
    aliases=("BertForMaskedLM", "BertForPreTraining"),
    classifying="BertForSequenceClassification",
    classifier=classifier,
)
