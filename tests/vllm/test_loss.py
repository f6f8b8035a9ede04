"""An installation on vLLM: its engine is killed under load, and every stream ends whole."""

from __future__ import annotations

import concurrent.futures
import json
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest

from services.cli.stack.default_model import TINY_MODEL
from services.common.ports import free_port
from tests.stack import RunningStack, ryzanstein
from tests.vllm.installation import PYTHON, START_S, engine_pid

pytestmark = pytest.mark.timeout(900)
STREAMS, TOKENS = 16, 200


@dataclass
class LossStream:
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)  # between the two likeliest tokens
    finish: str = ""
    usage: dict[str, int] = field(default_factory=dict)


def read(stack: RunningStack, number: int) -> LossStream:
    actual = LossStream()
    body = {
        "model": stack.model(),
        "prompt": [5 + number, *range(40, 80)],
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 2,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    with httpx.stream("POST", f"{stack.url}/v1/completions", json=body, timeout=300) as answer:
        assert answer.status_code == httpx.codes.OK, answer.read()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            actual.usage = event.get("usage") or actual.usage
            for choice in event["choices"]:
                actual.ids += choice.get("token_ids") or []
                actual.finish = choice["finish_reason"] or actual.finish
                for row in (choice.get("logprobs") or {}).get("top_logprobs") or ():
                    values = sorted(row.values(), reverse=True)
                    actual.margins.append(values[0] - values[1] if len(values) > 1 else 0.0)  # two tokens of one text
    return actual


def read_all(stack: RunningStack) -> list[concurrent.futures.Future[LossStream]]:
    pool = concurrent.futures.ThreadPoolExecutor(STREAMS)
    return [pool.submit(read, stack, number) for number in range(STREAMS)]


def test_a_killed_engine_costs_no_stream_a_token(stack: RunningStack, capsys: pytest.CaptureFixture[str]) -> None:
    whole = [future.result() for future in read_all(stack)]
    streams = read_all(stack)
    stack.wait_busy(2, requests=2)
    worker = stack.busiest()
    psutil.Process(engine_pid(stack, worker)).kill()
    answers = [future.result() for future in streams]
    for answer in answers:
        assert (answer.finish, len(answer.ids)) == ("length", TOKENS)
        assert answer.usage == {**answer.usage, "prompt_tokens": 41, "completion_tokens": TOKENS}
    assert sum(stack.resumes().values()) >= 1
    with capsys.disabled():
        for number, (one, other) in enumerate(zip(whole, answers, strict=True)):
            if one.ids != other.ids:
                at = next(i for i, (a, b) in enumerate(zip(one.ids, other.ids, strict=True)) if a != b)
                print(f"stream {number} differs from token {at} on, where two tokens were {one.margins[at]:.2g} apart")  # noqa: T201 - for the reader
                assert one.margins[at] < 1e-3, "no near tie"
    stack.wait_serving(2, timeout_s=START_S)


@pytest.mark.parametrize(
    ("argument", "error"),
    [
        ("no_such_thing=1", "unknown keyword argument 'no_such_thing'"),
        (
            'speculative_config={"method": "ngram", "num_speculative_tokens": 4}',
            "speculative_config: vLLM drafts on GPUs",
        ),
    ],
)
def test_wrong_arguments_are_refused_at_the_start(tmp_path: Path, argument: str, error: str) -> None:
    engine = ("--engine=vllm", f"--engine-python={PYTHON}", f"--engine-arg={argument}")
    start = ("--model", str(TINY_MODEL), "--port", str(free_port()), "--start-timeout", str(START_S))
    refused = ryzanstein("up", *engine, *start, runtime_dir=tmp_path, timeout_s=START_S)
    assert refused.returncode != 0
    assert f"RYZANSTEIN_ENGINE_ARGS: {error}" in refused.stderr + refused.stdout
