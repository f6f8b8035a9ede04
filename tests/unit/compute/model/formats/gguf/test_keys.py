"""Every key that GGUF has for an architecture is read, without an effect, or refused by its name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from services.compute.backends.collectives import SingleRank
from services.compute.backends.opening import open_backend
from services.compute.model.build import load_model
from services.compute.model.families.config import Config
from services.compute.model.formats.gguf.architectures import ARCHITECTURES
from services.compute.model.formats.gguf.config import find_architecture, read_config
from services.compute.model.formats.gguf.container import GgufFile, read_container
from services.compute.model.formats.gguf.keys import PASSED
from services.compute.model.formats.gguf.metadata import GgufMetadata
from services.compute.model.registry import FAMILIES, describe, interpret
from services.compute.model.spec import ModelError
from tests.unit.compute.model import zoo
from tests.unit.compute.model.formats.gguf.llama_cpp import LlamaCpp
from tests.unit.compute.model.formats.gguf.models import write_model
from tests.unit.compute.model.formats.gguf.test_architectures import CASES, Case, _model
from tests.unit.compute.model.harness import CPU, CachedDecoder
from tests.unit.compute.model.loading.test_gguf import TOKENS, add_tokenizer

ODD = (7, 0.7, "odd", True, (3, 0, 0, 0))  # values that no key has in these models
ON = ("attention.causal", "expert_weights_norm")  # where they are absent


def _constants(group: type) -> Iterator[str]:
    for name, value in vars(group).items():
        if isinstance(value, str) and not name.startswith("__"):
            yield value
        elif isinstance(value, type):
            yield from _constants(value)


KEYS = sorted(key.removeprefix("{arch}.") for key in _constants(gguf.Keys) if key.startswith("{arch}."))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, GgufFile]:
    """A file of each architecture."""
    folder = tmp_path_factory.mktemp("keys")
    made = {}
    for name in ARCHITECTURES:
        case = CASES[name]
        made[name] = read_container(write_model(_model(case), case.arch, folder / f"{name}.gguf", **case.keys))
    return made


def _config(file: GgufFile, changed: dict[str, Any]) -> Config:
    values = {key: value for key, value in {**file.metadata, **changed}.items() if value is not None}
    file = GgufFile(GgufMetadata(file.metadata.file, values), file.tensors)
    architecture = find_architecture(file.metadata)
    return read_config(file, FAMILIES[architecture.hub], architecture)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_no_key_is_dropped_in_silence(name: str, files: dict[str, GgufFile]) -> None:
    prefix, passed = f"{CASES[name].arch}.", {*PASSED, *ARCHITECTURES[name].passed}
    plain, tried = _read(files[name], {}), 0
    first = set() if f"{prefix}rope.scaling.factor" in files[name].metadata else {"rope.scale_linear"}
    for key in {*KEYS, *first} - passed:
        known = prefix + key.replace("{dense}", "dense_2")
        for odd in ODD:
            if odd == files[name].metadata.get(known) or (odd is True and key in ON):
                continue
            actual, tried = _read(files[name], {known: odd}), tried + 1
            assert actual != plain, f"{known}: {odd} is dropped"
            assert isinstance(actual, dict) or known in actual or prefix in actual
    assert tried > 300


def _read(file: GgufFile, changed: dict[str, Any]) -> dict[str, Any] | str:
    """The config.json that a changed file is read as, or why it is refused."""
    try:
        return _config(file, changed).values
    except ModelError as error:
        return str(error).removeprefix(f"{file.metadata.file}: ")


def test_switches_with_default_on_are_never_turned_off_in_silence(files: dict[str, GgufFile]) -> None:
    for name, key in (("llama", "attention.causal"), ("qwen3moe", "expert_weights_norm")):
        with pytest.raises(ModelError, match=rf"{key}: false is not implemented .*; allowed: true"):
            _config(files[name], {f"{name}.{key}": False})
    with pytest.raises(ModelError, match=r"granite.rope.scaling.finetuned: false"):
        _config(files["granite"], {"granite.rope.scaling.finetuned": False})


NEUTRAL: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"rope.dimension_sections": (0, 0, 0, 0)}),
    ("llama", {"attention.head_count": (4, 4), "feed_forward_length": (64, 64), "attention.head_count_kv": (2, 2)}),
    ("llama", {"swiglu_clamp_exp": (0.0, 0.0), "expert_weights_scale": 1.0, "attention.scale": 12**-0.5}),
    ("llama", {"attention.sliding_window": 128, "embedding_length_out": 48, "rope.freq_base_swa": 10_000.0}),
    ("llama", {"rope.scaling.yarn_ext_factor": 1.0, "rope.scaling.yarn_attn_factor": 1.0, "logit_scale": 1.0}),
    ("llama", {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}),
    ("qwen3moe", {"expert_gating_func": 1, "expert_group_count": 1, "expert_weights_norm": True}),
    ("gemma3", {"attention.sliding_window_pattern": (True, False, True), "attn_logit_softcapping": 50.0}),
    ("gemma2", {"attention.sliding_window_pattern": 2, "attention.key_length_swa": 16, "attention.scale": 0.25}),
    ("gpt2", {"attention.head_count_kv": 4, "attention.key_length": 12, "attention.value_length": 12}),
]


@pytest.mark.parametrize(("name", "keys"), NEUTRAL, ids=lambda one: one if isinstance(one, str) else next(iter(one)))
def test_values_without_an_effect_are_accepted(name: str, keys: dict[str, Any], files: dict[str, GgufFile]) -> None:
    plain = interpret(_config(files[name], {}))[1]
    actual = interpret(_config(files[name], {f"{name}.{key}": value for key, value in keys.items()}))[1]
    assert actual == plain


@dataclass(frozen=True)
class Spelling:
    """A file of a case with other keys."""

    case: str
    keys: dict[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()


_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_YARN = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 32}
SPELLINGS = {
    "yarn with a factor of its own": Spelling("llama", _YARN | {"rope__scaling__attn_factor": 1.4}),
    "yarn without an original length": Spelling("llama", {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}),
    "yarn of no more than 1": Spelling("llama", _YARN | {"rope__scaling__factor": 0.5}),
    "a factor without a type": Spelling("llama", {"rope__scaling__factor": 3.0}),
    "the first files' factor": Spelling("llama", {"rope__scale_linear": 3.0}),
    "no base of the rope": Spelling("smollm3", without=("rope.freq_base",)),
    "no heads for keys": Spelling("llama_tied_biased", without=("attention.head_count_kv",)),
    "Gemma 2's first files": Spelling("gemma2", without=_CAPS),
    "Gemma 2 without a window": Spelling("gemma2", without=("attention.sliding_window",)),
    "Gemma 3 with a final cap": Spelling("gemma3", {"final_logit_softcapping": 2.0}),
    "Gemma 3 with a cap of scores": Spelling("gemma3", {"attn_logit_softcapping": 0.1}),
    "Gemma 3 without a window": Spelling("gemma3", without=("attention.sliding_window",)),
    "Gemma 3 without a local base": Spelling("gemma3", without=("rope.freq_base_swa",)),
    "Granite with one scale": Spelling(
        "granite", without=("embedding_scale", "attention.scale", "residual_scale", "rope.freq_base")
    ),
    "Granite with scales of 0": Spelling(
        "granite", {"embedding_scale": 0.0, "attention__scale": 0.0, "residual_scale": 0.0}
    ),
    "NeoX with a base": Spelling("gptneox", {"rope__freq_base": 500.0}),
    "equal lists": Spelling("llama", {"feed_forward_length": [64, 64], "attention__head_count": [4, 4]}),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_files_are_read_like_llama_cpp(name: str, tmp_path: Path) -> None:
    message = SPELLINGS[name]
    case: Case = CASES[message.case]
    model = _model(case)
    if "attention.head_count_kv" in message.without:
        model = _model(Case(case.arch, case.variant, {"num_key_value_heads": 4}))
    keys = case.keys | message.keys
    file = write_model(model, case.arch, tmp_path / "m.gguf", describe=add_tokenizer, without=message.without, **keys)
    ids = zoo.prompt(40)
    served = load_model(describe(file), SingleRank(), open_backend(torch.float32, CPU))
    actual = served.logits(CachedDecoder(served).run(ids, []))[-1, : len(TOKENS)].log_softmax(-1)
    expected = LlamaCpp(file).log_probabilities(ids, len(TOKENS))
    assert len(expected) == len(TOKENS)
    assert max(abs(float(actual[token]) - value) for token, value in expected.items()) < 0.02
