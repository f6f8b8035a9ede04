"""Drafts change no token on real ranks: sampled, greedy, penalised, biased, scored, with grammars and adapters."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from llguidance import LLMatcher
from ryzanstein.v1.worker_pb2 import Sampling

from services.compute.token_logprobs import TokenLogprobs
from services.worker.engine.output import Finish, Output
from services.worker.native.offline import OfflineEngine, open_offline
from services.worker.protocol.order_codec import AdapterOrder
from services.worker.protocol.plan import StepResult
from services.worker.scheduling.request import Request
from services.worker.scheduling.speculation import DraftCost
from services.worker.settings import WorkerSettings
from tests.adapters import write_adapter
from tests.models import BUNDLED_MODEL
from tests.unit.worker.scheduling.harness import Guesses

SCHEMA = (
    '{"type": "object", "properties": {"first name": {"type": "boolean"}, "second name": {"enum": ["red", "green"]}}, '
)
SCHEMA += '"required": ["first name", "second name"], "additionalProperties": false}'
KINDS = (
    {},
    {"temperature": 0.9},
    {"temperature": 1.1, "top_p": 0.9, "seed": 3},
    {"temperature": 0.8, "top_k": 20, "min_p": 0.02, "seed": 4},
    {"temperature": 0.7, "frequency_penalty": 0.6, "presence_penalty": 0.4, "seed": 5},
    {"repetition_penalty": 1.3},
    {"logit_bias": {300: 3.0, 301: -3.0}, "temperature": 0.5},
    {"logprobs": 3, "temperature": 1.0, "seed": 6},
    {"min_tokens": 30, "temperature": 1.0, "seed": 7, "stop_token_ids": tuple(range(260, 1000))},
    {"stop_token_ids": tuple(range(260, 600)), "temperature": 1.0, "seed": 8},
    {"grammar": LLMatcher.grammar_from_json_schema(SCHEMA), "stop_token_ids": (0, 1)},
    {"grammar": LLMatcher.grammar_from_regex(r"(red|green|blue){3,9}[0-9]{5}"), "temperature": 1.0, "logprobs": 1},
)
Answer = tuple[list[int], Finish | None, list[TokenLogprobs], tuple[float, ...]]


def requests(root: bytes) -> list[Request]:
    """A request of each kind, another choice of one of them, and an embedding."""
    prompts = [[5 + (7 * i + number) % 250 for i in range(20 + number)] for number in range(len(KINDS))]
    choice = Request(list(prompts[2]), len(prompts[2]), Sampling(temperature=1.1, seed=30), max_tokens=40)
    embedded = Request(list(range(5, 60)), 55, Sampling(), embed=True)
    choice.chain_root = embedded.chain_root = root
    made = [choice, embedded]
    for number, (prompt, fields) in enumerate(zip(prompts, KINDS, strict=True)):
        sampling = Sampling(max_tokens=40 + number, **fields)  # type: ignore[arg-type]
        adapter = 0 if number % 3 == 0 else -1
        request = Request(prompt, len(prompt), sampling, max_tokens=sampling.max_tokens, tenant=str(number))
        request.adapter, request.chain_root = adapter, root
        made.append(request)
    return made


def continuations(texts: Sequence[Answer], root: bytes) -> list[Request]:
    """Requests that go on after all that the others have got, in the blocks that these have left."""
    made = []
    for before, (answer, *_) in zip(requests(root), texts, strict=True):
        ids = [*before.token_ids, *answer, 9]
        request = Request(ids, len(ids), Sampling(logprobs=2), max_tokens=3, tenant=before.tenant)
        request.adapter, request.chain_root = before.adapter, root
        made.append(request)
    return made


async def answers(engine: OfflineEngine, made: Sequence[Request], guesses: Sequence[Answer] = ()) -> list[Answer]:
    """The requests' answers, computed together; with `guesses` from drafts that often know it."""
    ends: dict[Request, Finish | None] = {}
    scores: dict[Request, list[TokenLogprobs]] = {request: [] for request in made}
    pooled: dict[Request, tuple[float, ...]] = {}

    def apply(result: StepResult) -> list[tuple[Request, Output]]:
        outputs = engine.scheduler.apply(result)
        for request, output in outputs:
            ends[request], pooled[request] = output.finish, output.embedding
            scores[request] += output.logprobs
        return outputs

    engine.apply = apply  # type: ignore[method-assign]
    engine.scheduler.speculator.cost = DraftCost(1.0, 0.001) if guesses else DraftCost()
    submit = engine.scheduler.submit

    def submit_with_guesses(request: Request, *, deferred: bool = False) -> None:
        submit(request, deferred=deferred)
        if guesses and request.drafts is not None:
            text = guesses[made.index(request)][0]
            drafter = Guesses(text, request.n_prompt, random.Random(request.n_prompt))
            request.drafts.drafters = [*request.drafts.drafters, drafter]

    engine.scheduler.submit = submit_with_guesses  # type: ignore[method-assign]
    await engine.run(made)
    engine.scheduler.submit = submit  # type: ignore[method-assign]
    return [(one.token_ids[one.n_prompt :], ends[one], scores[one], pooled[one]) for one in made]


@pytest.mark.parametrize(("ranks", "kv_dtype", "blocks"), [(4, "auto", 512), (2, "int8", 24)])
async def test_drafts_change_no_answer(ranks: int, kv_dtype: str, blocks: int, tmp_path: Path) -> None:
    """Twenty-four blocks are too few: requests are preempted, and go on later.

    What steps with drafts leave in the prefix cache is as good: texts go on from there with the same bits.
    """
    write_adapter(BUNDLED_MODEL, tmp_path / "adapter", {"q_proj": 4, "up_proj": 4})
    settings = WorkerSettings(
        adapter_sources=(str(tmp_path),),
        adapter_slots=1,
        model=str(BUNDLED_MODEL),
        tensor_parallel=ranks,
        kv_dtype=kv_dtype,
        kv_tokens=blocks * 16,
        max_model_len=256,
        max_running=32,
    )
    async with open_offline(settings) as engine:
        assert not await engine.group.load_adapter(AdapterOrder(0, str(tmp_path / "adapter"), "digest"))
        expected = await answers(engine, requests(b"plain"))
        drafted = await answers(engine, requests(b"drafted"), expected)
        counters = engine.scheduler.counters
        assert drafted == expected
        assert len(drafted[1][3]) > 0
        proposed, accepted = counters.proposed_tokens["guesses"], counters.accepted_tokens["guesses"]
        assert proposed >= accepted > 0
        assert blocks < 100 or (proposed > accepted > 100 and counters.accepted_tokens["grammar"] > 5)
        assert {finish for _, finish, _, _ in expected} == {Finish.STOP, Finish.LENGTH, Finish.EMBEDDED}
        assert (counters.preemptions > 0) == (blocks < 100)
        followed = continuations(expected, b"drafted")
        assert await answers(engine, continuations(expected, b"plain")) == await answers(engine, followed)
        before = requests(b"")
        assert blocks < 100 or any(one.cached_tokens > of.n_prompt for one, of in zip(followed, before, strict=True))
