"""RoBERTa and XLM-RoBERTa: BERT with one kind of text, whose positions are counted after that of padding."""

from __future__ import annotations

from dataclasses import replace

from services.compute.model.families.bert import UNREAD, encoder_refs, encoder_spec
from services.compute.model.families.classifying import first_state, read_labels
from services.compute.model.families.config import Config
from services.compute.model.families.naming import Family, Refs
from services.compute.model.spec import Classifier, HeadLayer, ModelSpec

_UNUSED_ROWS = 2  # rows of the position table up to the row of padding, which is token 1


def read_spec(config: Config) -> ModelSpec:
    """Read a RoBERTa or XLM-RoBERTa config.json. Raises ModelError."""
    config.require("pad_token_id", _UNUSED_ROWS - 1)
    spec = encoder_spec(config, str(config.raw("model_type") or "roberta"))
    if spec.max_positions <= _UNUSED_ROWS:
        raise config.error("max_position_embeddings", f"expected more than {_UNUSED_ROWS}, found {spec.max_positions}")
    return replace(spec, max_positions=spec.max_positions - _UNUSED_ROWS)


def refs(spec: ModelSpec) -> Refs:
    """Name their tensors."""
    refs = encoder_refs(spec, "roberta.")
    n_stored = spec.max_positions + _UNUSED_ROWS
    refs["positions"] = replace(refs["positions"], start=_UNUSED_ROWS, n_stored=n_stored)
    return refs


def classifier(config: Config, spec: ModelSpec) -> Classifier:
    """Return the head over the state of the first token. Raises ModelError."""
    dense = HeadLayer("classifier.dense", spec.hidden_size, activation="tanh")
    return first_state(config, dense, HeadLayer("classifier.out_proj", len(read_labels(config))))


def _family(name: str, model_type: str) -> Family:
    return Family(
        f"{name}Model",
        model_type,
        read_spec,
        refs,
        UNREAD,
        optional_prefix="roberta.",
        aliases=(f"{name}ForMaskedLM",),
        classifying=f"{name}ForSequenceClassification",
        classifier=classifier,
    )


ROBERTA = _family("Roberta", "roberta")
XLM_ROBERTA = _family("XLMRoberta", "xlm-roberta")
