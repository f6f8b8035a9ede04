"""Encoders compute what transformers computes: alone and among others, on one rank and on several, with their heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from services.compute.backends.base import ModelBackend
from services.compute.backends.batch import StepBatch
from services.compute.backends.collectives import Communicator, SingleRank
from services.compute.backends.cpu.backend import OneDnnBackend
from services.compute.backends.torch.backend import TorchBackend
from services.compute.model.build import load_model
from services.compute.model.decoder import Decoder
from services.compute.model.footprint import footprint
from services.compute.model.loading.pooling import Pooling
from services.compute.model.registry import describe, read_spec
from services.compute.model.spec import HeadLayer, ModelError, ModelSpec
from services.compute.ranks.config import PoolingKind, RankGroupConfig
from services.worker.rank.pooling import PooledSlots
from tests.unit.compute.model.harness import CPU, CachedDecoder, load_changed, run_ranks
from tests.unit.compute.model.zoo import randomise

_SHAPE: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "num_labels": 3,
}
_ROBERTA = {"max_position_embeddings": 66, "type_vocab_size": 1, "pad_token_id": 1}
_MODERN = {"local_attention": 16, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2}
_DECODER = {"num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 1}
CONFIGS: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "Bert": lambda: transformers.BertConfig(**_SHAPE),
    "Roberta": lambda: transformers.RobertaConfig(**_SHAPE | _ROBERTA),
    "XLMRoberta": lambda: transformers.XLMRobertaConfig(**_SHAPE | _ROBERTA),
    "ModernBert": lambda: transformers.ModernBertConfig(**_SHAPE | _MODERN, classifier_pooling="mean"),
    "Gemma3Text": lambda: transformers.Gemma3TextConfig(
        **_SHAPE | _DECODER, head_dim=12, sliding_window=16, use_bidirectional_attention=True
    ),
}
LENGTHS = (40, 1, 17, 33)  # sequence lengths; windows are shorter than two of them
ENCODERS = ("Bert", "Roberta", "XLMRoberta", "ModernBert")
DECODERS = ("Llama", "Mistral", "Qwen3")
# (model, switch, wrong value); other switches are also those of decoders: test_switches.py
SWITCHES: list[tuple[str, str, Any]] = [
    ("Bert", "bidirectional", False),
    ("Gemma3Text", "bidirectional", False),
    ("Bert", "sum_norm", False),
    ("Bert", "final_norm", True),
    ("ModernBert", "final_norm", False),
    ("Bert", "n_token_types", 0),
    ("Roberta", "n_token_types", 2),
    ("Bert", "classifier", None),
]
_HEAD: list[tuple[str, Callable[[HeadLayer], HeadLayer]]] = [
    ("Bert", lambda layer: replace(layer, module="bert.encoder.layer.0.attention.output.dense")),
    ("Bert", lambda layer: replace(layer, n_out=47)),
    ("Bert", lambda layer: replace(layer, activation="identity")),
    ("Bert", lambda layer: replace(layer, bias=False)),
    ("ModernBert", lambda layer: replace(layer, bias=True)),
    ("ModernBert", lambda layer: replace(layer, norm="")),
]


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 99, (length,), generator=generator).tolist() for length in LENGTHS]


def write(name: str, kind: str, folder: Path) -> transformers.PreTrainedModel:
    """Write a random checkpoint of the class `<name><kind>`; returns transformers' model."""
    config = CONFIGS[name]() if name in CONFIGS else getattr(transformers, f"{name}Config")(**_SHAPE | _DECODER)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}{kind}")(config).eval()
    randomise(model)
    model.save_pretrained(folder)
    return model


def step(model: Decoder, sequences: list[list[int]], second_from: int | None = None) -> list[torch.Tensor]:
    """Compute all sequences in one step; returns the hidden states of each, [n, hidden_size]."""
    lengths = [len(ids) for ids in sequences]
    order = sorted(range(len(sequences)), key=lambda index: lengths[index] > 1)  # single rows come first
    positions = torch.cat([torch.arange(lengths[index]) for index in order])
    ends = np.cumsum([lengths[index] for index in order]).tolist()
    batch = StepBatch(
        token_ids=torch.tensor([token for index in order for token in sequences[index]]),
        positions=positions,
        kv_slots=positions,
        query_starts=(0, *ends),
        context_lens=tuple(lengths[index] for index in order),
        block_tables=torch.zeros(len(sequences), 1, dtype=torch.int64),
        n_decode=lengths.count(1),
        token_types=None if second_from is None else (positions >= second_from).long(),
    )
    hidden = model.forward(batch, model.make_cache(0, 16))
    starts = dict(zip(order, zip((0, *ends), ends, strict=False), strict=True))
    return [hidden[slice(*starts[index])] for index in range(len(sequences))]


def pooled(model: Decoder, hidden: torch.Tensor) -> torch.Tensor:
    assert model.spec.classifier is not None
    slots = PooledSlots(Pooling(model.spec.classifier.pooling, normalise=False), model.classifier)
    slots.admit(0)
    slots.add(0, 0, hidden)
    return torch.tensor(slots.result(0))


@pytest.mark.parametrize("name", CONFIGS)
def test_states_equal_transformers_alone_and_in_a_batch(name: str, backend: ModelBackend, tmp_path: Path) -> None:
    reference = write(name, "Model", tmp_path)
    model = load_model(describe(tmp_path), SingleRank(), backend)
    assert model.spec == read_spec(tmp_path)
    kv_token = footprint(model.spec, RankGroupConfig("", kv_tokens=1)).kv_token
    assert (model.spec.bidirectional, model.spec.generates, kv_token) == (True, False, 0)
    together = step(model, prompts())
    for ids, hidden in zip(prompts(), together, strict=True):
        with torch.no_grad():
            expected = reference(torch.tensor([ids])).last_hidden_state[0]
        assert (hidden.cpu() - expected).abs().max() <= 1e-4
        if isinstance(backend, OneDnnBackend):  # no bit depends on the neighbours
            assert torch.equal(hidden, step(model, [ids])[0])
    for size in (2, 4):

        def divided(comm: Communicator) -> list[torch.Tensor]:
            return step(load_model(describe(tmp_path), comm, TorchBackend(torch.float32, CPU)), prompts())

        for ranks in run_ranks(size, divided):
            assert all((a - b.cpu()).abs().max() <= 1e-4 for a, b in zip(ranks, together, strict=True))


@pytest.mark.parametrize("name", [*ENCODERS, *DECODERS])
def test_labels_equal_transformers(name: str, tmp_path: Path) -> None:
    """Those of BERT also for two texts, which it tells apart."""
    reference = write(name, "ForSequenceClassification", tmp_path)
    model = load_model(describe(tmp_path), SingleRank(), TorchBackend(torch.float32, CPU))
    assert model.spec.classifier is not None
    assert (model.spec.classifier.labels, model.spec.classifier.function) == (
        ("LABEL_0", "LABEL_1", "LABEL_2"),
        "softmax",
    )
    ids = prompts()[0]
    for second_from in (None, 25) if name == "Bert" else (None,):
        types = torch.tensor([[0] * 25 + [1] * (len(ids) - 25)])
        with torch.no_grad():
            kinds = {} if second_from is None else {"token_type_ids": types}
            expected = reference(torch.tensor([ids]), **kinds).logits[0]
        if name in ENCODERS:
            (hidden,) = step(model, [ids], second_from)
        else:
            hidden = CachedDecoder(model).run(ids, [30])
        assert (pooled(model, hidden) - expected).abs().max() <= 1e-4


def _agree(
    name: str,
    kind: str,
    folder: Path,
    reference: transformers.PreTrainedModel,
    change: Callable[[ModelSpec], ModelSpec],
) -> bool:
    """Whether a model with a changed spec computes what transformers' model does; two texts for BERT."""
    try:
        model = load_changed(folder, change)
    except ModelError:  # a tensor is missing, left over or of another shape
        return False
    ids, second_from = prompts()[0], 25 if name == "Bert" else None
    types = {} if second_from is None else {"token_type_ids": (torch.arange(len(ids)) >= second_from).long()[None]}
    with torch.no_grad():
        expected = reference(torch.tensor([ids]), **types)
    actual = step(model, [ids], second_from)[0] if model.spec.bidirectional else CachedDecoder(model).run(ids, [30])
    if kind == "Model":
        return bool((actual - expected.last_hidden_state[0]).abs().max() <= 1e-4)
    return model.spec.classifier is not None and bool((pooled(model, actual) - expected.logits[0]).abs().max() <= 1e-4)


@pytest.mark.parametrize(("name", "switch", "wrong"), SWITCHES)
def test_every_switch_of_encoders_matters(name: str, switch: str, wrong: Any, tmp_path: Path) -> None:
    kind = "ForSequenceClassification" if switch == "classifier" else "Model"
    reference = write(name, kind, tmp_path)
    assert _agree(name, kind, tmp_path, reference, lambda spec: spec)
    assert not _agree(name, kind, tmp_path, reference, lambda spec: replace(spec, **{switch: wrong}))


@pytest.mark.parametrize(("name", "change"), _HEAD)
def test_every_switch_of_a_head_for_labels_matters(
    name: str, change: Callable[[HeadLayer], HeadLayer], tmp_path: Path
) -> None:
    """Of its first layer; the function and the labels are compared above."""
    kind = "ForSequenceClassification"
    reference = write(name, kind, tmp_path)

    def changed(spec: ModelSpec) -> ModelSpec:
        assert spec.classifier is not None
        first, *others = spec.classifier.layers
        return replace(spec, classifier=replace(spec.classifier, layers=(change(first), *others)))

    assert not _agree(name, kind, tmp_path, reference, changed)


@pytest.mark.parametrize(("name", "wrong"), [("Bert", "mean"), ("ModernBert", "cls"), ("Qwen3", "mean")])
def test_the_pooling_of_a_label_head_changes_the_result(name: str, wrong: PoolingKind, tmp_path: Path) -> None:
    kind = "ForSequenceClassification"
    reference = write(name, kind, tmp_path)

    def changed(spec: ModelSpec) -> ModelSpec:
        assert spec.classifier is not None
        return replace(spec, classifier=replace(spec.classifier, pooling=wrong))

    assert _agree(name, kind, tmp_path, reference, lambda spec: spec)
    assert not _agree(name, kind, tmp_path, reference, changed)
