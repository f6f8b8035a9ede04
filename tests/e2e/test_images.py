"""Images in all three APIs, through the whole system, on models that see."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Barrier
from typing import Any

import httpx
import pytest

from tests.seeing_model import FAMILIES, encoded, picture, question
from tests.stack import RunningStack, running_stack

LARGE, SMALL = picture(200, 120, 1), picture(20, 20, 2)
QUESTION = "What is on both?"
N_TOKENS, N_LONG = 24, 1100
SAMPLED = {"temperature": 1, "top_k": 20, "seed": 7}  # control tokens are never among the first 20
DIALECTS = ("chat/completions", "responses", "messages")


@dataclass
class ServedImages:
    stack: RunningStack
    model: str
    prompt: list[int]  # transformers', of both pictures and the question
    answer: list[int]

    def post(self, path: str, session: str = "one", **body: Any) -> dict[str, Any]:
        headers = {"x-session-id": session}
        answer = httpx.post(f"{self.stack.url}/v1/{path}", json=body, headers=headers, timeout=300)
        assert answer.status_code == httpx.codes.OK, answer.text
        decoded: dict[str, Any] = answer.json()
        return decoded

    def worker_of(self, session: str) -> str:
        """The worker that a session's requests go to."""
        options = {"stream": True, "stream_options": {"include_workers": True}, "max_tokens": 1}
        headers = {"x-session-id": session}
        url = f"{self.stack.url}/v1/chat/completions"
        text = httpx.post(url, json=self.body("chat/completions", **options), headers=headers, timeout=300).text
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        return next(
            str(choice["worker"]["id"]) for event in events for choice in event["choices"] if "worker" in choice
        )

    def body(self, dialect: str, **more: Any) -> dict[str, Any]:
        """A request about both pictures."""
        return question(dialect, [LARGE, SMALL], QUESTION, **{"model": self.model, **SAMPLED, **more})


# One family for each layout of frames: Qwen 2.5 VL shares that of Qwen 3 VL.
@pytest.fixture(scope="module", params=[name for name in FAMILIES if name != "qwen2_5_vl"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedImages]:
    family, folder = FAMILIES[request.param], tmp_path_factory.mktemp(request.param)
    model = family.write(folder)
    text = f"<|endoftext|><|user|>\n{family.placeholder * 2}{QUESTION}<|end|>\n<|assistant|>\n"
    prompt, answer = family.reference_answer(model, folder, text, [LARGE, SMALL], N_TOKENS)
    # Without drafts, which finish the tiny models' repetitions before a worker can die.
    options = ("--workers", "2", "--dtype", "float32", "--speculation", "off", "--served-model-name", family.layout)
    with running_stack(tmp_path_factory.mktemp("run"), *options, model=str(folder)) as stack:
        stack.wait_serving(2)
        yield ServedImages(stack, family.layout, prompt, answer)


def limit(dialect: str, n_tokens: int) -> dict[str, int]:
    return {"max_output_tokens" if dialect == "responses" else "max_tokens": n_tokens}


def test_tokens_and_usage_equal_transformers_and_images_are_cached(served: ServedImages) -> None:
    body = served.body("chat/completions", max_tokens=N_TOKENS, return_token_ids=True, temperature=0)
    for cached in (0, (len(served.prompt) - 1) // 16 * 16):
        answer = served.post("chat/completions", **body)
        assert answer["choices"][0]["token_ids"] == served.answer
        assert answer["usage"]["prompt_tokens"] == len(served.prompt)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
    body |= SAMPLED
    sampled = served.post("chat/completions", **body)
    url = body["messages"][0]["content"][0]["image_url"]
    url["url"] = f"data:image/png;base64,{encoded(picture(200, 120, 9))}"
    changed = served.post("chat/completions", **body)
    assert changed["usage"]["prompt_tokens"] == len(served.prompt)
    assert changed["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert changed["choices"][0]["token_ids"] != sampled["choices"][0]["token_ids"]
    count = served.post("messages/count_tokens", **served.body("messages"))
    assert count == {"input_tokens": len(served.prompt)}


def test_answers_about_images_survive_the_death_of_their_worker(served: ServedImages) -> None:
    """One death interrupts an answer in each dialect; the text is that of an undisturbed answer, which all share."""
    whole = served.post(DIALECTS[0], "whole", **served.body(DIALECTS[0], **limit(DIALECTS[0], N_LONG)))
    expected = str(whole["choices"][0]["message"]["content"])
    assert len(expected) > N_LONG / 2
    worker, resumes = served.worker_of("one"), sum(served.stack.resumes().values())
    ranks = served.stack.rank_pids(worker)
    begun = Barrier(len(DIALECTS), lambda: os.kill(ranks[0], signal.SIGKILL))
    with ThreadPoolExecutor(len(DIALECTS)) as clients:
        texts = list(clients.map(lambda dialect: _streamed(served, dialect, begun), DIALECTS))
    assert texts == [expected] * len(DIALECTS)
    assert sum(served.stack.resumes().values()) > resumes


def _streamed(served: ServedImages, dialect: str, begun: Barrier) -> str:
    """The text of a streamed answer; `begun` is awaited with its first piece."""
    body = served.body(dialect, stream=True, **limit(dialect, N_LONG))
    text, url = "", f"{served.stack.url}/v1/{dialect}"
    with httpx.stream("POST", url, json=body, headers={"x-session-id": "one"}, timeout=300) as stream:
        for line in stream.iter_lines():
            piece = _delta(dialect, json.loads(line[6:])) if line.startswith("data: {") else ""
            if piece and not text:
                begun.wait(300)
            text += piece
    return text


def _delta(dialect: str, event: dict[str, Any]) -> str:
    if dialect == "chat/completions":
        return "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    if dialect == "responses":
        return str(event["delta"]) if event["type"] == "response.output_text.delta" else ""
    return str(event["delta"].get("text", "")) if event["type"] == "content_block_delta" else ""
