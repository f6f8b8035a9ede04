"""2 and 4 ranks compute what one computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from services.compute.backends.opening import open_backend
from services.compute.backends.shapes import ExpertRouting
from services.compute.model.build import load_model
from services.compute.model.decoder import Decoder
from services.compute.model.registry import describe
from services.compute.model.spec import LayerSpec, ModelError, ModelSpec, MoeSpec
from tests.unit.compute.model.conftest import Sample
from tests.unit.compute.model.harness import CPU, CachedDecoder, ThreadRank, run_ranks
from tests.unit.compute.model.zoo import VARIANTS

# 2 KV heads on 4 ranks are shared by pairs; 99 tokens are padded on every number of ranks.
# Variants of a family that differ from another one of it in what ranks do not divide.
_ALIKE = {
    *("llama_linear", "llama_dynamic", "llama_llama3", "llama_yarn", "llama_yarn_mscale", "qwen2_sliding"),
    *("qwen3_moe_unnormalised", "phi3_longrope", "phi3_longrope_short", "phi3_partial", "gpt2_unscaled_wide"),
    *("starcoder2_unbiased", "stablelm_parallel", "exaone4_global", "gpt_bigcode_heads", "falcon_grouped_one_norm"),
    *("falcon_serial", "phimoe_longrope", "lfm2", "granitemoehybrid_dense", "qwen3_5_moe"),
    *("qwen3_5_multimodal", "qwen3_5_moe_multimodal", "qwen3_vl_moe_multimodal", "falcon_mamba", "falcon_h1_normed"),
}
_CASES = [(variant, size) for variant in VARIANTS if variant not in _ALIKE for size in (2, 4)]


def _load(folder: object, rank: ThreadRank) -> Decoder:
    return load_model(describe(folder), rank, open_backend(torch.float32, CPU))  # type: ignore[arg-type]


@pytest.mark.parametrize(("variant", "size"), _CASES)
def test_several_ranks_equal_a_single_rank(variant: str, size: int, sample: Callable[[str], Sample]) -> None:
    expected = sample(variant)

    def work(rank: ThreadRank) -> tuple[torch.Tensor, torch.Tensor, Decoder]:
        torch.set_num_threads(1)
        model = _load(expected.folder, rank)
        hidden = CachedDecoder(model, rank).run(expected.ids, [7, 1, 20, 1])
        return hidden, model.logits(hidden), model

    results = run_ranks(size, work)
    for hidden, _, _ in results:
        assert torch.equal(hidden, results[0][0])  # every rank holds the same bits
    logits = torch.cat([part for _, part, _ in results], dim=-1)
    vocab = expected.logits.shape[1]
    assert (logits[:, :vocab] - expected.logits).abs().max() <= 1e-4
    assert torch.isneginf(logits[:, vocab:]).all()
    starts = [model.logit_shard.first_id for _, _, model in results]
    assert starts == [rank * results[0][2].vocab_local for rank in range(size)]


def test_a_layer_has_one_all_reduce_after_attention_and_one_after_the_mlp(sample: Callable[[str], Sample]) -> None:
    expected = sample("llama")

    def work(rank: ThreadRank) -> tuple[int, int]:
        model = _load(expected.folder, rank)
        engine, before = CachedDecoder(model, rank), rank.n_calls
        engine.run(expected.ids, [])
        return rank.n_calls - before, model.spec.n_layers

    for calls, n_layers in run_ranks(2, work):
        assert calls == 1 + 2 * n_layers  # one more for the embedding


def test_an_indivisible_model_is_rejected(sample: Callable[[str], Sample]) -> None:
    class Third(ThreadRank):
        """A rank that never gets as far as a collective."""

        def __init__(self) -> None:
            self.rank, self.size = 0, 3

    with pytest.raises(ModelError, match=r"^4 attention heads cannot be divided among 3 ranks: 1, 2 or 4 ranks work$"):
        _load(sample("llama").folder, Third())


_DENSE = ModelSpec(
    family="llama", dtype="bfloat16", vocab_size=99, hidden_size=72, ffn_size=1536, n_heads=9, n_kv_heads=3,
    head_dim=8, max_positions=128, layers=(LayerSpec(),),
)  # fmt: skip


@pytest.mark.parametrize(
    ("spec", "size", "message"),
    [
        (_DENSE, 2, "9 attention heads cannot be divided among 2 ranks: 1 or 3 ranks work"),
        (_DENSE, 9, "1536 MLP columns cannot be divided among 9 ranks: 1 or 3 ranks work"),
        (replace(_DENSE, ffn_size=1152), 4, "9 attention heads cannot be divided among 4 ranks: 1, 3 or 9 ranks work"),
        (replace(_DENSE, n_heads=12), 2, "3 KV heads cannot be divided among 2 ranks: 1, 3, 6 or 12 ranks work"),
        (
            replace(_DENSE, n_heads=7, n_kv_heads=1),
            7,
            "1536 MLP columns cannot be divided among 7 ranks: only 1 rank works",
        ),
        (
            replace(_DENSE, n_heads=8, n_kv_heads=8, layers=(LayerSpec(moe=MoeSpec(4, 8, ExpertRouting(2, True))),)),
            8,
            "4 experts cannot be divided among 8 ranks: 1, 2 or 4 ranks work",
        ),
    ],
)
def test_a_refusal_names_the_numbers_of_ranks_that_work(spec: ModelSpec, size: int, message: str) -> None:
    with pytest.raises(ModelError) as refused:
        spec.kv_heads_per_rank(size)
    assert str(refused.value) == message
    assert all(spec.kv_heads_per_rank(count) for count in spec.rank_counts())
