"""A step is launched before the tokens of the one before are read; the tokens are those of steps in turn."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import transformers
from ryzanstein.v1.worker_pb2 import Sampling

from services.compute.backends.collectives import SingleRank
from services.compute.model.adapters.served import read_adapter
from services.compute.model.build import load_model
from services.compute.model.layers.adapters import AdapterLayers
from services.compute.model.registry import describe
from services.worker.protocol.plan import Admission, Chunk, StepPlan
from services.worker.protocol.plan_codec import view_plan
from services.worker.scheduling.request import Request
from tests.adapters import write_adapter
from tests.unit.compute.backends.tape import TapedBackend, Unasked
from tests.unit.compute.model.zoo import prompt, write_checkpoint
from tests.unit.worker.rank.late import BLOCK, LENGTH, N_BLOCKS, SlowDevice, assert_same, make_runner, serve
from tests.unit.worker.rank.standin import VOCAB, StandinDecoder, standin_cache


def make_requests(seed: int, host_share: float = 0.25) -> list[Request]:
    """Greedy, drawn and filtered, with short ends and long ones, and a share that needs the host."""
    rng = random.Random(seed)
    on_host = [
        Sampling(repetition_penalty=1.3),
        Sampling(logprobs=2),
        Sampling(prompt_logprobs=1),
        Sampling(logit_bias={3: 5.0}, min_tokens=2),
    ]
    actual = []
    for number in range(12):
        on_device = Sampling(
            temperature=rng.choice([0.0, 1.0]), top_k=rng.choice([0, 0, 5]), top_p=rng.choice([1, 0.9])
        )
        sampling = rng.choice(on_host) if rng.random() < host_share else on_device
        sampling.seed = number
        sampling.stop_token_ids.extend(rng.sample(range(VOCAB), 3))
        prompt = [rng.randrange(88) for _ in range(rng.randint(1, 40))]
        actual.append(Request(prompt, len(prompt), sampling, max_tokens=rng.randint(1, 50)))
    return actual


@pytest.mark.parametrize("seed", range(2))
def test_tokens_equal_those_of_steps_without_overlap(seed: int) -> None:
    """Requests end, are cancelled and preempted, and slots get others, while a later step is launched already."""
    served, cut = [], set[int]()
    for overlaps in (False, True):
        requests, device, cache = make_requests(seed), SlowDevice(random.Random(seed)), standin_cache(N_BLOCKS, BLOCK)
        runner = make_runner(StandinDecoder(SingleRank()), cache, device, overlaps=overlaps)
        cut |= serve(requests, runner, cache, device, seed + overlaps)
        served.append(requests)
    assert device.n_overlaps > 20
    assert any(request.n_preempted for request in requests)
    assert_same(*served, cut)


@pytest.mark.parametrize("graphs", [False, True])
def test_no_launch_waits_for_the_device(graphs: bool, tmp_path: Path) -> None:
    """Prompts and decodes by turns and together, with adapters and without, with filters and without."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    shape = {"vocab_size": 99, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2}
    write_checkpoint(transformers.LlamaConfig(**shape, num_attention_heads=4, max_position_embeddings=LENGTH), base)
    write_adapter(base, adapter, {"q_proj": 4, "down_proj": 4})
    device = SlowDevice(random.Random(0))
    backend = TapedBackend(torch.float32, device, graphs=graphs, mixed=graphs)
    decoder = load_model(describe(base), SingleRank(), backend, adapters=AdapterLayers(2, 4))
    decoder.adapters.put(1, decoder.adapters.read(read_adapter(adapter, describe(base), 4)))
    runner = make_runner(decoder, decoder.make_cache(N_BLOCKS, BLOCK), device, overlaps=True)
    kinds = (Sampling(temperature=1.0), Sampling(temperature=1.0, top_p=0.9), Sampling(temperature=1.0, top_k=5))
    first, second, third = (
        Admission(slot, kind, tuple(prompt(9, 99, slot)), 9, adapter=slot % 2 * 2 - 1)
        for slot, kind in enumerate(kinds)
    )
    plans = [
        StepPlan(0, (), (first, second), (Chunk(0, 0, 9, 1, (1,)), Chunk(1, 0, 5, 0, (2,)))),
        StepPlan(1, (), (third,), (Chunk(0, 9, 1, 1), Chunk(1, 5, 4, 1), Chunk(2, 0, 9, 1, (3,)))),
        StepPlan(2, (), (), tuple(Chunk(slot, 9 + (slot == 0), 1, 1) for slot in range(3))),
        StepPlan(3, (), (), (Chunk(2, 10, 1, 1),)),
    ]
    for plan in plans:
        with Unasked():
            launched = runner.launch(view_plan(plan))
        assert launched.awaited
        assert runner.finish(launched)
