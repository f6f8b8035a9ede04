"""A plan or result that crosses the ring is the one that was sent."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ryzanstein.v1.worker_pb2 import Sampling

from services.compute.ranks.config import RankGroupConfig
from services.compute.ranks.memory import MemoryAccount
from services.compute.token_logprobs import TokenLogprobs
from services.worker.protocol.event_codec import (
    ModelFacts,
    RankError,
    RankStarted,
    decode_event,
    encode_event,
)
from services.worker.protocol.order_codec import (
    AdapterOrder,
    CopyOrder,
    Order,
    SleepOrder,
    StateOrder,
    WakeOrder,
    decode_answer,
    decode_order,
    encode_answer,
    encode_order,
)
from services.worker.protocol.plan import (
    Admission,
    Chunk,
    Frame,
    Save,
    SlotResult,
    StepPlan,
    StepResult,
    StepTimes,
    TowerWork,
)
from services.worker.protocol.plan_codec import PlanView, decode_plan, encode_plan
from services.worker.protocol.rank_config import RankSettings, ServerEndpoint
from services.worker.protocol.result_codec import decode_result, encode_result
from services.worker.protocol.words import MalformedMessageError, Words, read_words

ids = st.integers(0, 2**31 - 1)
floats = st.floats(width=32, allow_nan=False)


def tuples(of: st.SearchStrategy, max_size: int = 5) -> st.SearchStrategy:
    return st.lists(of, max_size=max_size).map(tuple)


sampling = st.builds(
    Sampling,
    temperature=floats,
    top_k=ids,
    top_p=floats,
    min_p=floats,
    repetition_penalty=floats,
    presence_penalty=floats,
    frequency_penalty=floats,
    logit_bias=st.dictionaries(ids, floats, max_size=5),
    seed=st.integers(0, 2**64 - 1),
    min_tokens=ids,
    stop_token_ids=tuples(ids),
    logprobs=st.none() | ids,
    prompt_logprobs=st.none() | ids,
    grammar=st.text(max_size=9),
    ignore_eos=st.booleans(),
)
admissions = st.builds(
    Admission,
    slot=ids,
    sampling=sampling,
    token_ids=tuples(ids, 20),
    n_prompt=ids,
    embed=st.booleans(),
    adapter=st.integers(-1, 300),
    restore=st.integers(-1, 300),
    spans=tuples(st.tuples(ids, ids, ids), 3),
)
chunks = st.builds(
    Chunk, slot=ids, start=ids, n_tokens=ids, draws=st.booleans(), new_blocks=tuples(ids), proposals=tuples(ids)
)
frames = st.builds(Frame, first=ids, n_tokens=st.just(1), pixels=st.binary(max_size=9), columns=ids)
begun_frames = st.builds(Frame, first=ids, n_tokens=st.just(1), pixels=st.just(b""), columns=ids)
plans = st.builds(
    StepPlan,
    step=st.integers(0, 2**63 - 1),
    released=tuples(ids),
    admissions=tuples(admissions, 3),
    chunks=tuples(chunks, 8),
    saves=tuples(st.builds(Save, ids, ids, ids), 4),
    tower=tuples(
        st.builds(TowerWork, slot=ids, frame=frames, start=st.just(0), stop=ids)
        | st.builds(TowerWork, slot=ids, frame=begun_frames, start=st.integers(1, 99), stop=ids),
        3,
    ),
)
adapter_orders = st.builds(
    AdapterOrder,
    slot=ids,
    folder=st.text(max_size=9),
    digest=st.text(max_size=9),
    keep=st.booleans(),
    forget=tuples(st.text(max_size=9), 3),
)
logprobs = st.integers(0, 4).flatmap(
    lambda n: st.builds(
        TokenLogprobs,
        token_id=ids,
        logprob=floats,
        rank=ids,
        top_ids=st.tuples(*[ids] * n),
        top_logprobs=st.tuples(*[floats] * n),
    )
)


slot_results = st.builds(
    SlotResult,
    slot=ids,
    token_ids=tuples(ids),
    logprobs=tuples(logprobs, 3),
    prompt_logprobs=tuples(logprobs, 3),
    pooled=tuples(floats, 6),
    failure=st.text(max_size=9),
    forced=tuples(ids),
)
results = st.builds(
    StepResult,
    step=st.integers(0, 2**63 - 1),
    slots=tuples(st.tuples(ids, tuples(ids)).map(lambda row: SlotResult(*row)) | slot_results, 8),
    times=st.builds(StepTimes, wait=ids, forward=ids, communication=ids, sample=ids),
)


def split(words: Words, counts: Words) -> list[tuple[int, ...]]:
    ends = np.cumsum(counts)
    return [tuple(words[end - count : end].tolist()) for end, count in zip(ends, counts, strict=True)]


def as_written(view: PlanView) -> StepPlan:
    """The plan as the scheduler wrote it."""
    columns = (view.slots.tolist(), view.starts.tolist(), view.n_tokens.tolist(), view.draws.tolist())
    admissions = [
        Admission(
            a.slot,
            a.sampling,
            tuple(a.token_ids.tolist()),
            a.n_prompt,
            a.embed,
            a.second_from,
            a.adapter,
            a.restore,
            a.spans,
        )
        for a in view.admissions
    ]
    blocks, proposals = split(view.new_blocks, view.block_counts), split(view.proposals, view.proposal_counts)
    chunks = tuple(Chunk(*row) for row in zip(*columns, blocks, proposals, strict=True))
    saves = tuple(Save(*row) for row in view.saves.tolist())
    tower = tuple(
        TowerWork(work.slot, Frame(work.first, 1, work.pixels.tobytes(), work.columns), work.start, work.stop)
        for work in view.tower
    )
    return StepPlan(view.step, tuple(view.released.tolist()), tuple(admissions), chunks, saves, tower)


@given(plans)
def test_plan_round_trip(plan: StepPlan) -> None:
    assert as_written(decode_plan(read_words(bytes(encode_plan(plan))))) == plan


@given(results)
def test_result_round_trip(result: StepResult) -> None:
    assert decode_result(read_words(bytes(encode_result(result)))) == result


state_orders = st.builds(StateOrder, out=st.booleans(), row=ids, start=ids, size=ids)


@given(ids, adapter_orders | state_orders | st.builds(SleepOrder, level=ids) | st.just(WakeOrder()))
def test_order_round_trip(number: int, order: Order) -> None:
    assert decode_order(read_words(bytes(encode_order(number, order)))) == (number, order)


@given(ids, st.booleans(), st.lists(ids, max_size=9))
def test_copy_order_round_trip(number: int, out: bool, blocks: list[int]) -> None:
    message = bytes(encode_order(number, CopyOrder(out, np.array(blocks, np.int32))))
    decoded, order = decode_order(read_words(message))
    assert isinstance(order, CopyOrder)
    assert (decoded, order.out, order.blocks.tolist()) == (number, out, blocks)


@given(ids, st.text(max_size=9))
def test_answer_round_trip(number: int, error: str) -> None:
    assert decode_answer(read_words(bytes(encode_answer(number, error)))) == (number, error)


@given(
    st.one_of(
        plans.map(lambda plan: (encode_plan(plan), decode_plan)),
        results.map(lambda result: (encode_result(result), decode_result)),
        adapter_orders.map(lambda order: (encode_order(1, order), decode_order)),
        st.text(max_size=9).map(lambda error: (encode_answer(1, error), decode_answer)),
    ),
    st.data(),
)
def test_truncated_message_is_refused(sent: tuple[memoryview, Callable[[Words], object]], data: st.DataObject) -> None:
    message, decode = sent
    words = read_words(bytes(message))
    n_left = data.draw(st.integers(1, len(words) - 1))
    with pytest.raises(MalformedMessageError):
        decode(words[:n_left])


@pytest.mark.parametrize(
    ("message", "decode"),
    [
        (encode_plan(StepPlan(1)), decode_plan),
        (encode_order(1, AdapterOrder(0, "/adapter")), decode_order),
        (encode_answer(1, "an error"), decode_answer),
    ],
)
def test_trailing_words_are_refused(message: memoryview, decode: Callable[[Words], object]) -> None:
    with pytest.raises(MalformedMessageError, match="1 words too many"):
        decode(np.append(read_words(message), np.int32(0)))


@pytest.mark.parametrize(
    ("decode", "expected"),
    [
        (decode_order, "not an order"),
        (decode_answer, "not an answer to an order"),
        (decode_event, "not an event"),
        (decode_result, "not a result"),
    ],
)
def test_a_message_of_another_kind_is_refused(decode: Callable[[Words], object], expected: str) -> None:
    with pytest.raises(MalformedMessageError, match=expected):
        decode(read_words(encode_plan(StepPlan(1))))
    with pytest.raises(MalformedMessageError, match="a message of 7 bytes is not made of 32-bit words"):
        read_words(b"7 bytes")


def test_result_with_a_negative_number_of_tokens_is_refused() -> None:
    words = np.array(read_words(encode_result(StepResult(1, (SlotResult(0, (5,)), SlotResult(1, (6,)))))))
    words[-4:-2] = (-1, 3)  # instead of one token for each slot
    with pytest.raises(MalformedMessageError, match="-1 tokens"):
        decode_result(words)


def test_minus_infinity_survives() -> None:
    result = StepResult(1, (SlotResult(3, (5,), (TokenLogprobs(5, float("-inf"), 96),)),))
    assert decode_result(read_words(encode_result(result))) == result


@pytest.mark.parametrize(
    "event",
    [
        RankStarted(1, 77, {"launch": 1.5, "warm_up": 0.25}, MemoryAccount(1, 2, 3, 4, 5, 6), 9, ModelFacts(96, 16)),
        RankError(0, 78, "ValueError: é", 'Traceback:\n  "x"', (1,)),
    ],
)
def test_event_round_trip(event: RankStarted | RankError) -> None:
    assert decode_event(read_words(encode_event(event))) == event


def test_settings_round_trip() -> None:
    settings = RankSettings(
        RankGroupConfig("/models/x", ranks=2, kv_tokens=512, eos_token_ids=(1, 0)),
        ServerEndpoint(1234, 5, 7, 1_700_000_000.25),
    )
    assert RankSettings.from_json(settings.to_json()) == settings


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dtype": "int8", "kv_tokens": 1}, "float32, bfloat16, float16"),
        ({"quantization": "int5", "kv_tokens": 1}, "none, int8, int4"),
        ({"device": "tpu", "kv_tokens": 1}, "cpu, cuda"),
        ({}, "exactly one of n_blocks, kv_tokens"),
        ({"kv_tokens": 1, "n_blocks": 1}, "exactly one of n_blocks, kv_tokens"),
        ({"kv_tokens": 0}, "at least one block"),
        ({"kv_fills": True}, "kv_fills is for the memory of GPUs"),
        ({"kv_tokens": 1, "ranks": 0}, "ranks must be at least 1, not 0"),
    ],
)
def test_config_names_the_field(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RankGroupConfig("m", **fields)  # type: ignore[arg-type]
