"""The bundled model through real rank processes: tensor parallelism does not change a token."""

from __future__ import annotations

from pathlib import Path

import pytest
from ryzanstein.v1.worker_pb2 import Sampling

from tests.integration.worker_ranks.conftest import Conversation, MakeGroup

MODEL = Path(__file__).parents[3] / "models" / "ryzanstein-tiny"
PROMPTS = [[0, 17, 300, 5], [0], list(range(2, 20))]

pytestmark = pytest.mark.skipif(
    not (MODEL / "model.safetensors").is_file(), reason="the bundled model is not in this checkout"
)


@pytest.mark.parametrize("params", [Sampling(temperature=0.8, top_p=0.95, seed=5, logprobs=2)])
async def test_one_and_two_ranks_generate_the_same(make_group: MakeGroup, params: Sampling) -> None:
    tokens, logprobs = [], []
    for ranks in (1, 2):
        group = make_group(ranks, str(MODEL), rank_module="services.worker.rank")
        started = await group.start()
        assert started.model.vocab_size == 4096
        for rank in started.ranks:
            phases = rank.phases
            assert phases["rendezvous"] + phases["weights"] + phases["kv_cache"] + phases["warm_up"] < 10
            assert rank.ledger.weights > 5_000_000
        talk = Conversation(group, PROMPTS, params)
        tokens.append(await talk.run(12))
        logprobs.append([result.logprobs[0].logprob for result in talk.results])
        await group.stop()
    assert tokens[0] == tokens[1]
    assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)
