"""An adapter computes what its base with W + scale * B A computes, and a row's adapter concerns that row alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from services.compute.backends.base import ModelBackend
from services.compute.backends.batch import StepBatch
from services.compute.backends.collectives import Communicator, SingleRank
from services.compute.backends.opening import open_backend
from services.compute.kernels.bfloat16 import Call, open_kernels, why_not
from services.compute.model.adapters.peft import MERGED, PASSED, PLAIN, READ, READ_BY_MERGE
from services.compute.model.adapters.served import read_adapter
from services.compute.model.build import load_model
from services.compute.model.layers.adapters import AdapterLayers
from services.compute.model.registry import describe
from services.compute.model.spec import ModelError
from services.tools.merger.run import merge
from tests.adapters import write_adapter
from tests.unit.compute.kernels.test_capture import ComputingBackend
from tests.unit.compute.model.conftest import Sample
from tests.unit.compute.model.harness import CPU, CachedDecoder, DecoderRequest, adapter_rows, lone_rank, run_ranks

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
DELTA = ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj")
KIMI = ("q_proj", "k_proj", "v_proj", "f_a_proj", "f_b_proj", ".b_proj", "g_a_proj", "g_b_proj", "o_proj")
# Variant, ends of modules with their ranks, configuration, and the scale of each rank.
CASES: dict[str, tuple[str, dict[str, int], dict[str, Any], Callable[[int], float]]] = {
    "separate": ("llama", dict.fromkeys(LINEAR, 8), {}, lambda rank: 8 / rank),
    "fused": ("phi3", {"qkv_proj": 1, "gate_up_proj": 1}, {"use_rslora": True}, lambda rank: 8 / sqrt(rank)),
    "transposed": ("gpt2", {"c_attn": 16, "c_fc": 16}, {"fan_in_fan_out": True}, lambda rank: 8 / rank),
    "by KV head": ("falcon_grouped", {"query_key_value": 64, "dense": 64}, {}, lambda rank: 8 / rank),
    "latent": ("deepseek_v2", {"q_proj": 8, "o_proj": 8, "shared_experts.up_proj": 8}, {}, lambda rank: 8 / rank),
    "convolutions": ("lfm2", {"in_proj": 8, "out_proj": 8, "q_proj": 8, "w1": 8}, {}, lambda rank: 8 / rank),
    "state spaces": ("granitemoehybrid_dense", {"mamba.in_proj": 8, "out_proj": 8}, {}, lambda rank: 8 / rank),
    "factored": ("falcon_h1", {"mamba.in_proj": 8, "mamba.out_proj": 8}, {}, lambda rank: 8 / rank),
    "channels": ("mamba", dict.fromkeys(("in_proj", "x_proj", "dt_proj", "out_proj"), 8), {}, lambda rank: 8 / rank),
    "delta rules": ("qwen3_5", dict.fromkeys((*DELTA, "q_proj"), 8), {}, lambda rank: 8 / rank),
    "by key head": ("qwen3_next", {"in_proj_qkvz": 8, "in_proj_ba": 8}, {}, lambda rank: 8 / rank),
    "low rank": ("kimi_linear", dict.fromkeys(KIMI, 8), {}, lambda rank: 8 / rank),
    "lightning": ("minimax", dict.fromkeys(("qkv_proj", "out_proj", "output_gate"), 8), {}, lambda rank: 8 / rank),
    "patterns": (
        "gemma2",
        {"q_proj": 4, "1.mlp.down_proj": 2},
        {"rank_pattern": {"layers.1.mlp.down_proj": 2}, "alpha_pattern": {"down_proj": 3}},
        lambda rank: 3 / 2 if rank == 2 else 8 / 4,
    ),
}


class AdaptedEngine(CachedDecoder):
    """Gives each sequence's rows the adapter in `slots`, by the id of the request; -1 for none."""

    def __init__(self, model: Any, comm: Communicator | None = None, default: int = -1) -> None:
        super().__init__(model, comm or SingleRank(), block_tokens=16)  # the size that every kernel takes
        self.slots: dict[int, int] = {}
        self._default = default

    def batch(self, work: Any) -> StepBatch:
        rows = [self.slots.get(id(request), self._default) for request, n in work for _ in range(n)]
        return replace(super().batch(work), adapters=adapter_rows(rows))


def merged_logits(
    base: Path, changes: dict[str, torch.Tensor], out: Path, ids: list[int], turned: bool
) -> torch.Tensor:
    """The logits of a checkpoint whose weights are the base's plus `changes`."""
    shutil.copytree(base, out)
    tensors = load_file(base / "model.safetensors")
    tensors |= {name: tensors[name] + (change.t() if turned else change) for name, change in changes.items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, out / "model.safetensors")
    model = load_model(describe(out), SingleRank(), open_backend(torch.float32, CPU))
    return model.logits(CachedDecoder(model).run(ids, []))[:, : model.spec.vocab_size]


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_merged_weights(
    case: str, sample: Callable[[str], Sample], backend: ModelBackend, tmp_path: Path
) -> None:
    variant, modules, config, scale = CASES[case]
    base, ids = sample(variant).folder, sample(variant).ids
    raw = write_adapter(base, tmp_path / "a", modules, size=0.3, **config)
    ranks = {name: next(rank for end, rank in reversed(modules.items()) if end in name) for name in raw}
    changes = {name: change * scale(ranks[name]) for name, change in raw.items()}
    expected = merged_logits(base, changes, tmp_path / "merged", ids, bool(config.get("fan_in_fan_out")))
    adapter = read_adapter(tmp_path / "a", describe(base), 64)

    def logits(comm: Communicator) -> torch.Tensor:
        torch.set_num_threads(1)
        model = load_model(describe(base), comm, backend, adapters=AdapterLayers(2, 64))
        model.adapters.put(1, model.adapters.read(adapter))
        return model.logits(AdaptedEngine(model, comm, 1).run(ids, [7, 1, 20, 1]))

    most = 1e-4 * expected.abs().max()
    assert (logits(SingleRank())[:, : expected.shape[1]] - expected).abs().max() <= most
    assert (sample(variant).logits - expected).abs().max() > 0.1
    if case != "patterns" and backend.device == CPU:
        for size in (2, 4) if case == "separate" else (2,):
            parts = run_ranks(size, lambda rank: logits(rank))
            together = torch.cat(parts, dim=-1)[:, : expected.shape[1]]
            assert (together - expected).abs().max() <= most


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("variant", "modules"),
    [
        *[("llama", LINEAR), ("qwen3_moe", LINEAR[:4]), ("gpt_oss", LINEAR[:4])],
        ("granitemoehybrid_dense", ("in_proj", "out_proj")),
    ],
)
def test_a_row_has_the_same_bits_alone_and_beside_other_adapters(
    variant: str, modules: tuple[str, ...], dtype: torch.dtype, sample: Callable[[str], Sample], tmp_path: Path
) -> None:
    """Also where steps are replayed, where an adapter is loaded in another's place, and for the base's own rows."""
    base, ids = sample(variant).folder, sample(variant).ids
    adapters = []
    for seed, rank, size in ((1, 8, 0.3), (2, 3, 0.3), (3, 4, 1e25)):  # the product of the last one overflows
        write_adapter(base, tmp_path / str(seed), dict.fromkeys(modules, rank), seed=seed, size=size)
        adapters.append(read_adapter(tmp_path / str(seed), describe(base), 16))
    model = load_model(describe(base), lone_rank(), open_backend(dtype, CPU), adapters=AdapterLayers(2, 16))

    def run(slots: list[int], chunks: list[int]) -> list[torch.Tensor]:
        """The last hidden states of sequences with these slots, computed together."""
        engine, work = AdaptedEngine(model, lone_rank()), list[DecoderRequest]()
        for slot in slots:
            work.append(engine.admit(ids))
            engine.slots[id(work[-1])] = slot
        for chunk in chunks[:-1]:
            engine.step([(request, chunk) for request in work])
        return [rows[-1] for rows in engine.step([(request, chunks[-1]) for request in work])]

    plain = run([-1], [40, 1, 1, 1, 1])[0]
    model.adapters.put(0, model.adapters.read(adapters[1]))
    model.adapters.put(1, model.adapters.read(adapters[1]))
    second = run([1], [40, 1, 1, 1, 1])[0]
    model.adapters.put(0, model.adapters.read(adapters[0]))
    first = run([0], [40, 1, 1, 1, 1])[0]
    together = run([1, -1, 0, -1, 0], [37, 4, 1, 1, 1])
    for actual, expected in zip(together, (second, plain, first, plain, first), strict=True):
        assert torch.equal(actual, expected)
    assert not torch.equal(first, second)
    assert not torch.equal(first, plain)
    model.adapters.put(1, model.adapters.read(adapters[2]))
    overflowed, *others = run([1, -1, 0], [37, 4, 1, 1, 1])
    assert not overflowed.isfinite().any()
    assert all(torch.equal(actual, expected) for actual, expected in zip(others, (plain, first), strict=True))


def test_steps_without_adapters_call_the_same_kernels_as_a_model_without_slots(
    sample: Callable[[str], Sample], tmp_path: Path
) -> None:
    """No kernel more, whatever the slots hold."""
    if reason := why_not(torch.bfloat16):
        pytest.skip(reason)
    base, ids, kernels = sample("llama").folder, sample("llama").ids, open_kernels()
    write_adapter(base, tmp_path / "a", dict.fromkeys(LINEAR, 8))
    adapter = read_adapter(tmp_path / "a", describe(base), 8)

    def calls(slots: int, slot: int) -> list[str]:
        model = load_model(describe(base), SingleRank(), ComputingBackend(kernels), adapters=AdapterLayers(slots, 8))
        if slots:
            model.adapters.put(0, model.adapters.read(adapter))
        noted = list[Call]()
        with kernels.noted_in(noted):
            AdaptedEngine(model, default=slot).run(ids, [37, 1])
        return [name for name, _ in noted]

    plain = calls(0, -1)
    assert calls(2, -1) == plain
    assert len(calls(2, 0)) > len(plain) > 0


def spoil(folder: Path, *, tensors: dict[str, torch.Tensor] | None = None, **config: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    if tensors is not None:
        stored = load_file(folder / "adapter_model.safetensors")
        save_file({**stored, **tensors}, folder / "adapter_model.safetensors")


Q0 = "base_model.model.model.layers.0.self_attn.q_proj"
REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "DoRA": (lambda f: spoil(f, use_dora=True), "use_dora: True is not implemented; `ryzanstein merge`"),
    "whole modules": (lambda f: spoil(f, modules_to_save=["lm_head"]), r"modules_to_save: .* `ryzanstein merge`"),
    "biases": (lambda f: spoil(f, bias="all"), "bias: 'all' is not implemented; `ryzanstein merge`"),
    "another kind": (lambda f: spoil(f, peft_type="IA3"), "peft_type: expected LORA, found 'IA3'"),
    "PiSSA": (lambda f: spoil(f, init_lora_weights="pissa"), "init_lora_weights: 'pissa' changes the base's weights"),
    "LoRA-GA": (lambda f: spoil(f, init_lora_weights="lora_ga"), "init_lora_weights: 'lora_ga' changes the base's"),
    "an unknown beginning": (
        lambda f: spoil(f, init_lora_weights="x"),
        "init_lora_weights: 'x' .*true, false, gaussian",
    ),
    "KaSA": (lambda f: spoil(f, kasa_config={"beta": 1.0}), "kasa_config: .* is not implemented"),
    "an unknown key": (lambda f: spoil(f, use_new=True), "use_new: True is not known; PEFT 0.21 has no such key"),
    "no number": (
        lambda f: spoil(f, tensors={f"{Q0}.lora_A.weight": torch.full((4, 48), torch.nan)}),
        "layers.0.self_attn.q_proj.lora_A.weight: not all numbers are finite: it holds nan",
    ),
    "an infinite number in bfloat16": (
        lambda f: spoil(f, tensors={f"{Q0}.lora_B.weight": torch.full((48, 4), -torch.inf, dtype=torch.bfloat16)}),
        "layers.0.self_attn.q_proj.lora_B.weight: not all numbers are finite: it holds inf",
    ),
    "an infinite number in float16": (
        lambda f: spoil(f, tensors={f"{Q0}.lora_A.weight": torch.full((4, 48), torch.inf, dtype=torch.float16)}),
        "q_proj.lora_A.weight: not all numbers are finite",
    ),
    "a number too large for float32": (
        lambda f: spoil(f, tensors={f"{Q0}.lora_A.weight": torch.full((4, 48), 1e200, dtype=torch.float64)}),
        r"q_proj.lora_A.weight: .* it holds 1e\+200 beyond float32",
    ),
    "a number too large times the scale": (
        lambda f: spoil(f, tensors={f"{Q0}.lora_B.weight": torch.full((48, 4), 3e38)}),
        r"q_proj.lora_B.weight: .* it holds 3e\+38, times 2, beyond float32",
    ),
    "a rank that is not the tensors'": (lambda f: spoil(f, r=5), "q_proj.lora_A.weight: rank 4 .* says 5"),
    "half a rank": (lambda f: spoil(f, r=4.5), "r: expected a whole number from 1 on, found 4.5"),
    "half a rank of a pattern": (
        lambda f: spoil(f, rank_pattern={"q_proj": 4.5}),
        "rank_pattern: 'q_proj': expected a whole number from 1 on, found 4.5",
    ),
    "a flag that is a word": (lambda f: spoil(f, use_rslora="no"), "use_rslora: expected true or false, found 'no'"),
    "a pattern": (lambda f: spoil(f, alpha_pattern={"(": 1}), "alpha_pattern: expected numbers by pattern"),
    "an embedding": (
        lambda f: spoil(f, tensors={"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 9)}),
        r"embed_tokens.lora_embedding_A: not implemented .* `ryzanstein merge`",
    ),
    "the head": (
        lambda f: spoil(
            f,
            tensors={
                "base_model.model.lm_head.lora_A.weight": torch.ones(4, 48),
                "base_model.model.lm_head.lora_B.weight": torch.ones(99, 4),
            },
        ),
        "lm_head is an embedding or output head",
    ),
    "half a pair": (
        lambda f: spoil(f, tensors={f"{Q0}x.lora_A.weight": torch.ones(4, 48)}),
        "q_projx.lora_B.weight: missing",
    ),
    "another layer's shape": (
        lambda f: spoil(f, tensors={f"{Q0}.lora_B.weight": torch.ones(7, 4)}),
        "q_proj.lora_A.weight: made for a layer of 48 inputs and 7 outputs; this model's has 48 and 48",
    ),
    "a module that is not there": (
        lambda f: spoil(
            f,
            tensors={
                f"{Q0[:-12]}.x.lora_A.weight": torch.ones(4, 48),
                f"{Q0[:-12]}.x.lora_B.weight": torch.ones(48, 4),
            },
        ),
        "the model has no module",
    ),
    "a pickle": (
        lambda f: (f / "adapter_model.safetensors").rename(f / "adapter_model.bin"),
        "adapter_model.bin is a pickle",
    ),
    "a pair of rank 0": (
        lambda f: spoil(
            f, tensors={f"{Q0}.lora_A.weight": torch.ones(0, 48), f"{Q0}.lora_B.weight": torch.ones(48, 0)}
        ),
        r"q_proj.lora_A.weight: expected a matrix of .*, found F32 of the shape \[0, 48\]",
    ),
    "pairs for patterns": (
        lambda f: spoil(f, rank_pattern=[["q_proj", 4]]),
        "rank_pattern: expected numbers by pattern",
    ),
    "a scale beyond float32": (
        lambda f: spoil(f, alpha_pattern={"q_proj": 1e39}),
        "alpha_pattern: 'q_proj': 1e\\+39 is beyond float32",
    ),
    "nothing": (lambda f: save_file({}, f / "adapter_model.safetensors"), "holds no tensors of LoRA"),
    "a cut file": (
        lambda f: (f / "adapter_model.safetensors").write_bytes((f / "adapter_model.safetensors").read_bytes()[:-1]),
        "cut off",
    ),
    "bytes behind the tensors": (
        lambda f: (f / "adapter_model.safetensors").write_bytes(
            (f / "adapter_model.safetensors").read_bytes() + b"more"
        ),
        "too long",
    ),
}


def test_every_key_of_peft_s_configuration_has_a_meaning() -> None:
    names = {one.name for one in fields(LoraConfig)}
    groups = (set(READ), set(READ_BY_MERGE), set(PASSED), set(PLAIN))
    assert names <= set().union(*groups)
    assert sum(map(len, groups)) == len(set().union(*groups))
    assert set(MERGED) <= set(PLAIN)


def test_numbers_that_are_large_and_finite_are_read(sample: Callable[[str], Sample], tmp_path: Path) -> None:
    """Of each type, bfloat16 to its end."""
    base = sample("llama").folder
    write_adapter(base, tmp_path, {"q_proj": 4})
    for dtype, number in ((torch.bfloat16, -3.3e38), (torch.float16, 65_504.0), (torch.float64, 3e38)):
        spoil(tmp_path, tensors={f"{Q0}.lora_A.weight": torch.full((4, 48), number, dtype=dtype)})
        assert read_adapter(tmp_path, describe(base), 4).rank == 4


@pytest.mark.parametrize("what", REFUSED)
def test_unimplemented_features_are_rejected_by_key(what: str, sample: Callable[[str], Sample], tmp_path: Path) -> None:
    base = sample("llama").folder
    write_adapter(base, tmp_path, {"q_proj": 4})
    model = describe(base)
    assert read_adapter(tmp_path, model, 4).rank == 4
    with pytest.raises(ModelError, match=r"rank 4; at most 2 \(RYZANSTEIN_ADAPTER_MAX_RANK\)"):
        read_adapter(tmp_path, model, 2)
    change, message = REFUSED[what]
    change(tmp_path)
    with pytest.raises(ModelError, match=message):
        read_adapter(tmp_path, model, 4)


def test_missing_or_malformed_values_are_rejected_at_loading(sample: Callable[[str], Sample], tmp_path: Path) -> None:
    base = sample("llama").folder
    write_adapter(base, tmp_path, {"q_proj": 4})
    adapter = read_adapter(tmp_path, describe(base), 4)
    model = load_model(describe(base), SingleRank(), open_backend(torch.float32, CPU), adapters=AdapterLayers(1, 8))
    spoil(tmp_path, tensors={f"{Q0}.lora_A.weight": torch.full((4, 48), torch.nan)})
    with pytest.raises(ModelError, match=r"layers.0.self_attn.q_proj.lora_A.weight: not all numbers are finite"):
        model.adapters.read(adapter)
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"adapter_model.safetensors"):
        model.adapters.read(adapter)


def test_merging_reads_adapters_that_serving_rejects(sample: Callable[[str], Sample], tmp_path: Path) -> None:
    """DoRA, a bias, a table with factors, and a head of its own where the base ties it to the table."""
    base = sample("llama_tied_biased").folder
    before = load_file(base / "model.safetensors")
    table, bias = before["model.embed_tokens.weight"], "model.layers.0.self_attn.q_proj.bias"
    raw = write_adapter(base, tmp_path / "a", {"0.self_attn.o_proj": 4}, size=0.3)
    name, change = next(iter(raw.items()))
    magnitude, of_table, a, b = torch.rand(48) + 1, torch.rand(48) + 1, torch.randn(4, 99), torch.randn(48, 4)
    prefix = "base_model.model."
    added = {
        f"{prefix}{name.removesuffix('.weight')}.lora_magnitude_vector": magnitude,
        f"{prefix}{bias}": torch.full_like(before[bias], 2.0),
        f"{prefix}model.embed_tokens.lora_embedding_A": a,
        f"{prefix}model.embed_tokens.lora_embedding_B": b,
        f"{prefix}model.embed_tokens.lora_magnitude_vector": of_table,
    }
    spoil(tmp_path / "a", tensors=added, use_dora=True, bias="lora_only")
    with pytest.raises(ModelError, match=r"use_dora: .* `ryzanstein merge`"):
        read_adapter(tmp_path / "a", describe(base), 8)
    merge(base, tmp_path / "a", tmp_path / "m", lambda done, of: None)
    after = load_file(tmp_path / "m" / "model.safetensors")
    whole = before[name] + 2 * change
    direction = whole / whole.norm(dim=1, keepdim=True)
    assert torch.allclose(after[name], magnitude.unsqueeze(1) * direction, atol=1e-5)
    assert torch.equal(after[bias], added[f"{prefix}{bias}"])
    moved = table + 2 * (b @ a).t()
    assert torch.allclose(after["model.embed_tokens.weight"], of_table * moved / moved.norm(dim=0), atol=1e-4)
    assert torch.equal(after["lm_head.weight"], table)
    assert json.loads((tmp_path / "m" / "config.json").read_text())["tie_word_embeddings"] is False
    spoil(tmp_path / "a", tensors={f"{prefix}model.norm.lora_B.bias": torch.ones(1)})
    with pytest.raises(ModelError, match=r"model.norm.lora_B.bias: not implemented"):
        merge(base, tmp_path / "a", tmp_path / "other", lambda done, of: None)
    assert not (tmp_path / "other").exists()
