"""Adapters against PEFT itself: on bases whose weights are rounded to integers, and merged into their base."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.config import VeloraConfig
from safetensors.torch import load_file, save_file

from services.compute.backends.base import ModelBackend
from services.compute.backends.collectives import Communicator, SingleRank
from services.compute.backends.opening import open_backend
from services.compute.backends.torch.backend import TorchBackend
from services.compute.backends.weights import Rounded
from services.compute.cpu import has_vectors
from services.compute.model.adapters.served import read_adapter
from services.compute.model.build import load_model
from services.compute.model.layers.adapters import AdapterLayers
from services.compute.model.registry import describe
from services.compute.model.spec import ModelError
from services.compute.ranks.config import Quantization
from services.tools.merger.run import merge
from services.worker.adapters.slots import AdapterSources
from tests.adapters import write_adapter
from tests.unit.compute.model.harness import CPU, CachedDecoder, run_ranks
from tests.unit.compute.model.test_adapters import LINEAR, AdaptedEngine
from tests.unit.compute.model.zoo import VARIANTS, make, prompt, write_checkpoint

VOCABULARY = 203
IDS = prompt(23, VOCABULARY, 1)
GROUP = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base in `base`, and in `adapter` an adapter of all its linear layers."""
    path = tmp_path_factory.mktemp("peft")
    shape = {"vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 192, "num_key_value_heads": 4}
    write_checkpoint(make("LlamaConfig", **shape)(), path / "base").float().save_pretrained(path / "base")
    write_adapter(path / "base", path / "adapter", dict.fromkeys(LINEAR, 8), size=0.2, target_modules=list(LINEAR))
    return path


def with_peft(base: transformers.PreTrainedModel, folder: Path) -> PeftModel:
    return PeftModel.from_pretrained(base, str(folder / "adapter")).eval()


def rounded(base: transformers.PreTrainedModel, bits: int) -> None:
    """Replace the weights by the numbers that their codes stand for; tables and heads have 8 bits."""
    for name, weight in base.named_parameters():
        if weight.dim() == 2:
            here = bits if ".layers." in name else 8
            codes = Rounded(weight.detach(), 0, weight.shape[1], here, GROUP)  # type: ignore[arg-type]
            weight.data = codes.rows(0, len(weight)).float()


def logits(folder: Path, comm: Communicator, backend: ModelBackend, quantization: Quantization) -> torch.Tensor:
    base = describe(folder / "base")
    model = load_model(base, comm, backend, quantization=quantization, adapters=AdapterLayers(1, 8))
    model.adapters.put(0, model.adapters.read(read_adapter(folder / "adapter", base, 8)))
    return model.logits(AdaptedEngine(model, comm, 0).run(IDS, [5])).float()


@pytest.mark.parametrize(("quantization", "bits"), [("int8", 8), ("int4", 4)])
def test_an_adapter_on_rounded_weights_equals_peft_on_the_same_numbers(
    folder: Path, quantization: Quantization, bits: int
) -> None:
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    rounded(base, bits)
    with torch.no_grad():
        plain = base(torch.tensor([IDS])).logits[0]
        expected = with_peft(base, folder)(torch.tensor([IDS])).logits[0]

    def exact(comm: Communicator) -> torch.Tensor:
        torch.set_num_threads(1)
        return logits(folder, comm, TorchBackend(torch.float32, CPU), quantization)

    for actual in (exact(SingleRank()), torch.cat(run_ranks(2, exact), dim=-1)):
        assert (actual[:, :VOCABULARY] - expected).abs().max() <= 1e-4
    change = (plain - expected).abs().mean()
    if has_vectors():  # our kernels also round activations
        actual = logits(folder, SingleRank(), open_backend(torch.bfloat16, CPU), quantization)
        assert (actual[:, :VOCABULARY] - expected).abs().mean() < 0.1 * change


def test_a_merged_checkpoint_equals_the_merge_of_peft(folder: Path, tmp_path: Path) -> None:
    load: Callable[[Path], transformers.PreTrainedModel] = transformers.AutoModelForCausalLM.from_pretrained
    expected = with_peft(load(folder / "base"), folder).merge_and_unload().state_dict()  # type: ignore[operator]
    merge(folder / "base", folder / "adapter", tmp_path / "merged", lambda done, of: None)
    actual, before = load_file(tmp_path / "merged" / "model.safetensors"), load_file(folder / "base/model.safetensors")
    assert actual.keys() == before.keys()
    changed = {name for name, tensor in actual.items() if not torch.equal(tensor, before[name])}
    assert len(changed) == 2 * len(LINEAR)
    for name, tensor in actual.items():
        assert torch.allclose(tensor, expected[name], atol=1e-6, rtol=1e-5), name


def tune(base: transformers.PreTrainedModel, folder: Path, **config: Any) -> PeftModel:
    """Write an adapter of random numbers as PEFT saves it."""
    tuned = get_peft_model(base, LoraConfig(r=2, lora_alpha=6, **config)).eval()
    random = torch.Generator().manual_seed(1)
    for name, weight in tuned.named_parameters():
        if weight.requires_grad or "lora_" in name:
            noise = torch.randn(weight.shape, generator=random) * 0.2
            weight.data = weight.data + noise if "lora_" not in name or "magnitude" in name else noise
    tuned.save_pretrained(str(folder))
    return tuned


# Variants with what PEFT trains of them; expected are the logits of PEFT's own model.
TRAINED: dict[str, tuple[str, dict[str, Any]]] = {
    "DoRA": ("llama", {"use_dora": True, "target_modules": ["q_proj", "o_proj", "down_proj"]}),
    "DoRA of tables": ("llama", {"use_dora": True, "target_modules": ["q_proj", "embed_tokens"]}),
    "DoRA transposed": ("gpt2", {"use_dora": True, "target_modules": ["c_attn"], "fan_in_fan_out": True}),
    "biases of adapted layers": ("qwen2", {"bias": "lora_only", "target_modules": ["q_proj", "k_proj", "o_proj"]}),
    "a head with a name of its own": ("gpt_neox", {"target_modules": ["query_key_value", "lm_head"]}),
    "all biases": ("gpt2", {"bias": "all", "target_modules": ["c_attn"], "fan_in_fan_out": True}),
    "table and head": ("llama", {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}),
    "a tied table": ("llama_tied_biased", {"target_modules": ["embed_tokens", "v_proj"]}),
    "tied tables": (
        "llama_tied_biased", {"target_modules": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    "a tied module as a whole": (
        "llama_tied_biased",
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    "modules as a whole": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}),
    "routers": ("qwen3_moe", {"target_modules": ["q_proj"], "target_parameters": ["mlp.gate.weight"]}),
    "routers with other names": ("mixtral", {"target_modules": ["q_proj"], "target_parameters": ["mlp.gate.weight"]}),
    "routers alone": ("gpt_oss", {"target_modules": [], "target_parameters": ["mlp.router.weight"]}),
    "routers and experts": (
        "qwen3_moe", {"target_modules": [], "target_parameters": ["mlp.gate.weight", "mlp.experts.down_proj"]},
    ),
    "the text of a model of images": (
        "gemma3_multimodal", {"target_modules": r".*language_model.*\.(q_proj|up_proj)"},
    ),
    "images": ("gemma3_multimodal", {"target_modules": ["q_proj", "v_proj"]}),
    "orthogonal": ("llama", {"target_modules": ["q_proj"], "init_lora_weights": "orthogonal"}),
    "MiCA": ("llama", {"target_modules": ["q_proj"], "init_lora_weights": "mica"}),
    "VeLoRA": ("llama", {"target_modules": ["q_proj"], "velora_config": VeloraConfig(num_groups=4)}),
    "a base without its outer name": ("llama_mha_wide", {"target_modules": ["q_proj"], "use_rslora": True}),
}  # fmt: skip


@pytest.mark.parametrize("name", TRAINED)
def test_an_adapter_trained_by_peft_is_merged_without_a_change_of_outputs(name: str, tmp_path: Path) -> None:
    variant, config = TRAINED[name]
    tuned = tune(write_checkpoint(VARIANTS[variant](), tmp_path / "base"), tmp_path / "adapter", **config)
    file = tmp_path / "adapter/adapter_config.json"
    settings = json.loads(file.read_text())
    turned = not settings["fan_in_fan_out"]  # the base shows how it stores its matrices
    file.write_text(json.dumps(settings | {"fan_in_fan_out": turned}))
    ids = torch.tensor([prompt(20)])
    with torch.no_grad():
        expected = tuned(input_ids=ids).logits[0]
        with tuned.disable_adapter():
            plain = tuned(input_ids=ids).logits[0]
    merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged", lambda done, of: None)
    model = load_model(describe(tmp_path / "merged"), SingleRank(), TorchBackend(torch.float32, CPU))
    actual = model.logits(CachedDecoder(model).run(ids[0].tolist(), []))[:, : model.spec.vocab_size]
    assert (actual - expected).abs().max() <= 1e-4
    assert (plain - expected).abs().max() > 1e-2


# Names of a text's model in an adapter, which may have been trained without its wrapper or in another version of it.
NAMES = ("model.language_model.", "language_model.model.", "model.")


@pytest.mark.parametrize("prefix", NAMES)
def test_an_adapter_of_a_model_of_images_is_served_on_its_text(
    prefix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    tuned = tune(write_checkpoint(VARIANTS["gemma3_multimodal"](), base), adapter, target_modules=["q_proj", "v_proj"])
    ids = torch.tensor([prompt(20)])
    with torch.no_grad():
        expected = tuned(input_ids=ids).logits[0]
    stored = load_file(adapter / "adapter_model.safetensors")
    save_file(
        {name.replace("model.model.language_model.", f"model.{prefix}"): one for name, one in stored.items()},
        adapter / "adapter_model.safetensors",
    )
    assert any("vision_tower" in name for name in stored)
    served = load_model(describe(base), SingleRank(), TorchBackend(torch.float32, CPU), adapters=AdapterLayers(1, 2))
    actual = read_adapter(adapter, describe(base), 2)
    assert actual.n_left_out == sum("vision_tower" in name for name in stored)
    served.adapters.put(0, served.adapters.read(actual))
    logits = served.logits(AdaptedEngine(served, default=0).run(ids[0].tolist(), []))[:, : served.spec.vocab_size]
    assert (logits - expected).abs().max() <= 1e-4
    sources = AdapterSources(describe(base), 2, (str(adapter),), ())
    asyncio.run(sources.inspect(str(adapter)))
    assert f"{actual.n_left_out} of its tensors are not used: they change the vision tower" in caplog.text


# Where the base has a layer's experts: by expert, as one tensor, and as one of [in, out] under transformers' own name.
@pytest.mark.parametrize("variant", ["qwen3_moe", "granitemoe", "gpt_oss"])
def test_experts_that_peft_adapts_as_one_parameter_are_merged_and_not_served(variant: str, tmp_path: Path) -> None:
    base = write_checkpoint(VARIANTS[variant](), tmp_path / "base")
    fused = ["experts.gate_up_proj", "experts.down_proj"]
    config = LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj"], target_parameters=fused)
    tuned = get_peft_model(base, config).eval()
    for name, weight in tuned.named_parameters():
        if "lora_" in name:
            weight.data = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)) * 0.2
    tuned.save_pretrained(str(tmp_path / "adapter"))
    ids = torch.tensor([prompt(20)])
    with torch.no_grad():
        expected = tuned(ids).logits[0]
    with pytest.raises(ModelError, match=r"target_parameters: .* is not implemented; `ryzanstein merge`"):
        read_adapter(tmp_path / "adapter", describe(tmp_path / "base"), 64)
    merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged", lambda done, of: None)
    model = load_model(describe(tmp_path / "merged"), SingleRank(), TorchBackend(torch.float32, CPU))
    actual = model.logits(CachedDecoder(model).run(ids[0].tolist(), []))[:, : model.spec.vocab_size]
    assert (actual - expected).abs().max() <= 1e-4
    settings = tmp_path / "adapter/adapter_config.json"
    changed = json.loads(settings.read_text()) | {"rank_pattern": {"experts.down_proj": 3}}
    settings.write_text(json.dumps(changed))
    with pytest.raises(ModelError, match=r"experts.lora_A.weight: 8 rows .*; 4 experts of rank 3 have 12"):
        merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "other", lambda done, of: None)
    settings.write_text(json.dumps(changed | {"target_parameters": ["mlp.experts.x", "block_sparse_moe.experts.x"]}))
    with pytest.raises(ModelError, match=r"target_parameters: .*experts.x is not implemented for this model"):
        merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "other", lambda done, of: None)
