"""Every architecture of GGUF computes what transformers computes with the same weights, on 1, 2 and 4 ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from services.compute.backends.collectives import SingleRank
from services.compute.backends.opening import open_backend
from services.compute.model.adapters.served import read_adapter
from services.compute.model.build import load_model
from services.compute.model.formats.gguf import container, parts
from services.compute.model.formats.gguf.architectures import ARCHITECTURES
from services.compute.model.formats.gguf.container import GgufFile
from services.compute.model.formats.gguf.metadata import GgufMetadata
from services.compute.model.layers.adapters import AdapterLayers
from services.compute.model.registry import describe, read_spec
from services.compute.model.spec import ModelError
from tests.adapters import write_adapter
from tests.unit.compute.model import zoo
from tests.unit.compute.model.formats.gguf.models import Kinds, plain, random_model, uniform, write_model
from tests.unit.compute.model.formats.gguf.stateful import STATEFUL
from tests.unit.compute.model.harness import CPU, CachedDecoder, ThreadRank, run_ranks
from tests.unit.compute.model.test_adapters import LINEAR, AdaptedEngine

T = gguf.GGMLQuantizationType


@dataclass(frozen=True)
class Case:
    """A model of transformers, the architecture that GGUF calls it, and keys that its converter adds."""

    arch: str
    variant: str
    changed: dict[str, Any] = field(default_factory=dict)  # changes to the variant's config
    keys: dict[str, Any] = field(default_factory=dict)


_SCALED = {"rope__scaling__type": "linear", "rope__scaling__factor": 3.0}
_YARN = {
    "rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 32,
    "rope__scaling__yarn_beta_fast": 8.0,
}  # fmt: skip
_KINDS = {"layer_types": ["linear_attention", "full_attention"]}
_INTERVAL = {"num_hidden_layers": 2, **_KINDS}
CASES = {
    "llama": Case("llama", "llama"),
    "llama_tied_biased": Case("llama", "llama_tied_biased"),
    "llama_linear": Case("llama", "llama_linear", keys=_SCALED),
    "llama_yarn": Case("llama", "llama_yarn", keys=_YARN),
    "mistral": Case("llama", "mistral", {"sliding_window": None}),
    "mixtral": Case("llama", "mixtral", keys={"expert_count": 4, "expert_used_count": 2}),
    "qwen2": Case("qwen2", "qwen2"),
    "qwen3": Case("qwen3", "qwen3"),
    "qwen3moe": Case(
        "qwen3moe",
        "qwen3_moe",
        {"mlp_only_layers": []},
        {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32},
    ),
    "gemma": Case("gemma", "gemma"),
    "gemma2": Case(
        "gemma2",
        "gemma2",
        {"query_pre_attn_scalar": 16},
        {"attention__sliding_window": 13, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0},
    ),
    "gemma3": Case(
        "gemma3",
        "gemma3",
        {"query_pre_attn_scalar": 16},
        {
            "final_logit_softcapping": 3.0,
            "attention__sliding_window": 13,
            "attention__sliding_window_pattern": 2,
            "rope__freq_base_swa": 5000.0,
            "rope__scaling__type": "linear",
            "rope__scaling__factor": 4.0,
        },
    ),
    "phi3": Case("phi3", "phi3", keys={"attention__sliding_window": 13}),
    "phi3_partial": Case("phi3", "phi3_partial"),
    "olmo2": Case("olmo2", "olmo2"),
    "smollm3": Case(
        "smollm3",
        "smollm3",
        {
            "num_hidden_layers": 4,
            "use_sliding_window": False,
            "no_rope_layers": None,
            "layer_types": None,
            "no_rope_layer_interval": 4,
        },
    ),
    "granite": Case(
        "granite",
        "granite",
        keys={"embedding_scale": 3.0, "attention__scale": 0.2, "residual_scale": 0.6, "logit_scale": 2.5},
    ),
    "gpt2": Case("gpt2", "gpt2"),
    "gptneox": Case("gptneox", "gpt_neox"),
    "lfm2": Case("lfm2", "lfm2", {"block_auto_adjust_ff_dim": False}),
    "lfm2moe": Case("lfm2moe", "lfm2_moe", {"routed_scaling_factor": 1.0}),
    "granitehybrid": Case("granitehybrid", "granitemoehybrid"),
    "granitehybrid_dense": Case("granitehybrid", "granitemoehybrid_dense"),
    "falcon-h1": Case("falcon-h1", "falcon_h1"),
    "falcon-h1_normed": Case("falcon-h1", "falcon_h1_normed", {"mamba_norm_before_gate": False}),
    "nemotron_h": Case("nemotron_h", "nemotron_h"),
    "nemotron_h_moe": Case("nemotron_h_moe", "nemotron_h_moe"),
    "jamba": Case("jamba", "jamba"),
    "mamba": Case("mamba", "mamba", {"use_bias": False}),
    "falconmamba": Case("mamba", "falcon_mamba"),
    "mamba2": Case("mamba2", "mamba2"),
    "qwen3next": Case("qwen3next", "qwen3_next", _INTERVAL | {"mlp_only_layers": []}),
    "qwen35": Case("qwen35", "qwen3_5", _INTERVAL),
    "qwen35moe": Case("qwen35moe", "qwen3_5_moe", _INTERVAL),
}


# Cases of ropes whose frequencies are divided by stored factors.
_LONGROPE = {"rope__scaling__original_context_length": 32, "rope__scaling__attn_factor": math.sqrt(1.4)}
FACTORED = {
    "llama3": Case("llama", "llama_llama3"),
    "longrope": Case("phi3", "phi3_longrope", keys=_LONGROPE),
}


@dataclass(frozen=True)
class Made:
    file: Path
    ids: list[int]
    logits: torch.Tensor  # [len(ids), vocab_size], transformers'


def _model(case: Case) -> transformers.PreTrainedModel:
    base = zoo.VARIANTS[case.variant]()
    return random_model(type(base)(**{**base.to_dict(), **case.changed}))


def _make(name: str, case: Case, folder: Path, kinds: Kinds = plain) -> Made:
    model = _model(case)
    file = write_model(model, case.arch, folder / f"{name}.gguf", kinds, _factors(name, model), **case.keys)
    ids = zoo.prompt()
    return Made(file, ids, zoo.reference_logits(model, ids))


def _factors(name: str, model: transformers.PreTrainedModel) -> dict[str, np.ndarray]:
    """The tensors of factors of a model's rope."""
    if name == "longrope":
        rope = model.config.rope_parameters
        return {f"rope_factors_{kind}.weight": np.float32(rope[f"{kind}_factor"]) for kind in ("short", "long")}
    if name == "llama3":
        rotary = model.model.rotary_emb
        size = 2 * len(rotary.inv_freq)
        unscaled = 1 / 10_000.0 ** (torch.arange(0, size, 2) / size)
        return {"rope_freqs.weight": (unscaled / rotary.inv_freq).float().numpy()}
    return {}


# Modules of an adapter, by architectures whose names differ from Llama's.
_ADAPTED = {
    "gpt2": ("c_attn", "attn.c_proj", "c_fc"),
    "gptneox": ("query_key_value", "dense", "dense_h_to_4h"),
    "phi3": ("qkv_proj", "gate_up_proj"),
    "mixtral": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "qwen3moe": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "granitehybrid": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "qwen35": ("in_proj_qkv", "in_proj_z", "in_proj_a", "out_proj", "q_proj"),
}


def test_every_architecture_has_a_case() -> None:
    assert {case.arch for case in CASES.values()} | {"mixtral", "falconmamba"} == ARCHITECTURES.keys()


@pytest.mark.parametrize(
    "name", [name for name, case in (CASES | FACTORED).items() if name in _ADAPTED or case.arch not in STATEFUL]
)
def test_an_adapter_changes_the_same_outputs_as_in_transformers(name: str, tmp_path: Path) -> None:
    """Also where a file stores rows in another order than transformers, and in layers without a rope."""
    case, base = (CASES | FACTORED)[name], tmp_path / "base"
    model = _model(case)
    model.save_pretrained(base)
    file = write_model(model, case.arch, tmp_path / "m.gguf", tensors=_factors(name, model), **case.keys)
    modules = _ADAPTED.get("mixtral" if name == "mixtral" else case.arch, LINEAR)
    turned = case.arch == "gpt2"
    changes = write_adapter(
        base, tmp_path / "a", dict.fromkeys(modules, 4), size=0.3, **({"fan_in_fan_out": True} if turned else {})
    )
    ids = zoo.prompt()
    plain = zoo.reference_logits(model, ids)
    with torch.no_grad():
        stored = dict(model.named_parameters())
        for key, change in changes.items():
            stored[key] += 2 * (change.t() if turned else change)  # lora_alpha 8, rank 4
    expected = zoo.reference_logits(model, ids)
    served = load_model(describe(file), SingleRank(), open_backend(torch.float32, CPU), adapters=AdapterLayers(1, 4))
    served.adapters.put(0, served.adapters.read(read_adapter(tmp_path / "a", describe(file), 4)))
    actual = served.logits(AdaptedEngine(served, default=0).run(ids, [7, 1]))[:, : expected.shape[1]]
    assert (actual - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert (plain - expected).abs().max() > 0.1


def test_an_adapter_for_matrices_that_hold_factors_is_refused(tmp_path: Path) -> None:
    """A file of Falcon-H1 does not say which factors."""
    case = CASES["falcon-h1"]
    model = _model(case)
    model.save_pretrained(tmp_path / "base")
    file = write_model(model, case.arch, tmp_path / "m.gguf", **case.keys)
    write_adapter(tmp_path / "base", tmp_path / "a", {"q_proj": 4})
    assert read_adapter(tmp_path / "a", describe(tmp_path / "base"), 4).targets
    with pytest.raises(ModelError, match=r"the matrices of .*m\.gguf hold factors .*; serve the base from safetensors"):
        read_adapter(tmp_path / "a", describe(file), 4)


@pytest.mark.parametrize("name", CASES | FACTORED)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    made = _make(name, (CASES | FACTORED)[name], tmp_path)
    model = load_model(describe(made.file), SingleRank(), open_backend(torch.float32, CPU))
    assert model.spec == read_spec(made.file)
    logits = model.logits(CachedDecoder(model).run(made.ids, [20, 1]))[:, : made.logits.shape[1]]
    assert (logits - made.logits).abs().max() <= 1e-4


# Rows of 256 elements, so that every type fits; inputs of 2 and 4 ranks that begin within a block.
_WIDE = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}
_MIX = (T.Q4_0, T.Q8_0, T.Q4_1, T.Q5_1, T.MXFP4)


def _mixed(name: str) -> gguf.GGMLQuantizationType:
    """A type for each kind of matrix, as mixed quantizations have them, also for experts and embeddings."""
    return _MIX[sum(name.encode()) % len(_MIX)]


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Made]:
    folder = tmp_path_factory.mktemp("quantized")
    ternary = Case("llama", "llama", {**_WIDE, "num_hidden_layers": 1})
    experts = Case("llama", "mixtral", {**_WIDE, "num_hidden_layers": 1}, CASES["mixtral"].keys)
    states = {**_WIDE, "mamba_d_head": 64, "shared_intermediate_size": 512, "num_hidden_layers": 2, **_KINDS}
    tiled = {**_WIDE, **_INTERVAL, "linear_key_head_dim": 32, "linear_value_head_dim": 32}
    return {
        "tiled": _make("tiled", Case("qwen35", "qwen3_5", tiled), folder, _mixed),
        "states": _make("states", Case("granitehybrid", "granitemoehybrid_dense", states), folder, _mixed),
        "mixed": _make("mixed", Case("llama", "llama", _WIDE), folder, _mixed),
        "ternary": _make("ternary", ternary, folder, uniform(T.TQ2_0)),
        "experts": _make("experts", experts, folder, _mixed),
    }


@pytest.mark.parametrize("name", ["mixed", "ternary", "experts", "states", "tiled"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_quantized_models_equal_transformers_on_any_number_of_ranks(
    name: str, size: int, quantized: dict[str, Made]
) -> None:
    made = quantized[name]

    def work(rank: ThreadRank) -> torch.Tensor:
        torch.set_num_threads(1)
        model = load_model(describe(made.file), rank, open_backend(torch.float32, CPU))
        return model.logits(CachedDecoder(model, rank).run(made.ids, []))

    logits = torch.cat(run_ranks(size, work), dim=-1)[:, : made.logits.shape[1]]
    assert (logits - made.logits).abs().max() <= 1e-4 * made.logits.abs().max()
    assert torch.equal(logits.argmax(-1), made.logits.argmax(-1))


def test_layers_that_draft_are_not_loaded(tmp_path: Path) -> None:
    """Files of Qwen 3.5 count them as layers."""
    case = CASES["qwen35"]
    model = _model(case)
    drafting = {f"blk.2.{name}.weight": np.zeros((48, 48), np.float32) for name in ("nextn.eh_proj", "attn_k")}
    keys = {"block_count": 3, "nextn_predict_layers": 1}
    file = write_model(model, case.arch, tmp_path / "m.gguf", tensors=drafting, **keys)
    ids = zoo.prompt()
    served = load_model(describe(file), SingleRank(), open_backend(torch.float32, CPU))
    expected = zoo.reference_logits(model, ids)
    assert (served.logits(CachedDecoder(served).run(ids, []))[:, : expected.shape[1]] - expected).abs().max() <= 1e-4


def test_a_stored_head_is_used(tmp_path: Path) -> None:
    made = _make("llama", CASES["llama"], tmp_path)
    assert not read_spec(made.file).tied


_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown architecture": ({"general.architecture": "rwkv7"}, r"general.architecture: 'rwkv7' is not implemented"),
    "an unknown key": ({"llama.attention.clamp_kqv": 8.0}, r"llama.attention.clamp_kqv: 8.0 is not implemented"),
    "heads of two sizes": ({"llama.attention.value_length": 24}, r"attention.value_length: expected .* 12, found 24"),
    "a part of a head": ({"llama.rope.dimension_count": 6}, r"rope.dimension_count: expected 12, .* found 6"),
    "an unknown scaling": ({"llama.rope.scaling.type": "su"}, r"llama.rope.scaling.type: 'su' with"),
    "no number of layers": ({"llama.block_count": None}, r"num_hidden_layers: expected a positive integer"),
    "too few layers": ({"llama.block_count": 1}, r"num_hidden_layers: 1, but 2 layers are stored"),
    "another size": (
        {"llama.feed_forward_length": 48},
        r"expected shape \[48, 48\], found \[64, 48\]; intermediate_size",
    ),
    "layers of other sizes": (
        {"llama.attention.head_count": (4, 2)},
        r"attention.head_count: expected a number, or 2 eq",
    ),
    "a list of another length": ({"llama.attention.head_count": (4,)}, r"head_count: expected .* found \[4\]"),
    "no epsilon": (
        {"llama.attention.layer_norm_rms_epsilon": None},
        r"llama.attention.layer_norm_rms_epsilon: missing",
    ),
    "all tokens seen": ({"llama.attention.causal": False}, r"llama.attention.causal: false is not .*; allowed: true"),
    "more tokens than rows": (
        {"tokenizer.ggml.tokens": ("a",) * 100},
        r"100 tokens, but token_embd.weight has 99 rows",
    ),
    "no embedding": ({"token_embd.weight": None}, r"token_embd.weight: missing"),
    "a key of text": ({"llama.rope.freq_base": "high"}, r"rope_theta: expected a number above 0"),
}


@pytest.mark.parametrize("what", _REFUSED)
def test_unimplemented_features_are_rejected_by_name(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed, problem = _REFUSED[what]
    made = _make("llama", CASES["llama"], tmp_path)
    read = container.read_container

    def lying(file: Path) -> GgufFile:
        actual = read(file)
        values = {key: value for key, value in {**actual.metadata, **changed}.items() if value is not None}
        return GgufFile(GgufMetadata(file, values), {n: info for n, info in actual.tensors.items() if n not in changed})

    monkeypatch.setattr(parts, "read_container", lying)
    with pytest.raises(ModelError, match=problem) as refused:
        load_model(describe(made.file), SingleRank(), open_backend(torch.float32, CPU))
    assert str(refused.value).startswith(f"{made.file}: ")
