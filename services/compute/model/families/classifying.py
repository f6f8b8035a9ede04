"""Heads of checkpoints whose architecture is `...ForSequenceClassification`: one number for each label."""

from __future__ import annotations

from services.compute.model.families.config import Config
from services.compute.model.spec import Classifier, HeadLayer, LabelFunction, ModelSpec

_FUNCTIONS: dict[str, LabelFunction] = {
    "torch.nn.modules.linear.Identity": "identity",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.modules.activation.Softmax": "softmax",
}
_PROBLEMS: dict[str, LabelFunction] = {
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
    "regression": "identity",
}


def read_labels(config: Config) -> tuple[str, ...]:
    """Return the labels in order, from `id2label` or `num_labels`. Raises ModelError."""
    named = config.raw("id2label")
    if named is None:
        return tuple(f"LABEL_{index}" for index in range(config.integer("num_labels", 2)))
    numbers = [str(index) for index in range(len(named))] if isinstance(named, dict) else []
    if not numbers or set(named) != set(numbers):
        raise config.error("id2label", f"expected labels of the numbers from 0 on, found {named!r}")
    return tuple(str(named[number]) for number in numbers)


def first_state(config: Config, *layers: HeadLayer) -> Classifier:
    """Return the classifier over the state of the first token. Raises ModelError."""
    return Classifier("cls", layers, *read_classes(config))


def last_state(config: Config, spec: ModelSpec) -> Classifier:
    """Return the classifier of a decoder: a product with the state of the last token. Raises ModelError."""
    labels, function = read_classes(config)
    return Classifier("last", (HeadLayer("score", len(labels), bias=False),), labels, function)


def read_classes(config: Config) -> tuple[tuple[str, ...], LabelFunction]:
    """Return the labels in order and the function that makes scores of their numbers. Raises ModelError."""
    return read_labels(config), _function(config)


def _function(config: Config) -> LabelFunction:
    """Return a cross-encoder's own function, or that of the kind of problem."""
    own = config.raw("sentence_transformers")
    name = own.get("activation_fn") if isinstance(own, dict) else config.raw("sbert_ce_default_activation_function")
    if name is not None:
        if name not in _FUNCTIONS:
            raise config.error("sentence_transformers", f"{name!r} is not implemented; known: {', '.join(_FUNCTIONS)}")
        return _FUNCTIONS[name]
    problem = config.raw("problem_type")
    if problem is not None:
        return config.choice("problem_type", _PROBLEMS)
    return "sigmoid" if len(read_labels(config)) == 1 else "softmax"
