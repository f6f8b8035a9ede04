"""Images in all three APIs, through the whole system, on a model that sees."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.seeing_model import encoded, picture, reference_answer, write_seeing_model
from tests.stack import RunningStack, running_stack

LARGE, SMALL = picture(200, 120, 1), picture(20, 20, 2)
QUESTION = "What is on both?"
N_TOKENS, N_LONG = 24, 900
SAMPLED = {"temperature": 1, "top_k": 20, "seed": 7}  # control tokens are never among the first 20


@dataclass
class Served:
    stack: RunningStack
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
        text = httpx.post(url, json=body("chat/completions", **options), headers=headers, timeout=300).text
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        return next(
            str(choice["worker"]["id"]) for event in events for choice in event["choices"] if "worker" in choice
        )


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("seeing")
    model = write_seeing_model(folder)
    text = f"<|endoftext|><|user|><image><image>{QUESTION}<|end|>\n<|assistant|>\n"
    prompt, answer = reference_answer(model, folder, text, [LARGE, SMALL], N_TOKENS)
    options = ("--workers", "2", "--dtype", "float32", "--served-model-name", "seeing")
    with running_stack(tmp_path_factory.mktemp("run"), *options, model=str(folder)) as stack:
        stack.wait_serving(2)
        yield Served(stack, prompt, answer)


def body(dialect: str, **more: Any) -> dict[str, Any]:
    """A request about both pictures."""
    urls = [f"data:image/png;base64,{encoded(image)}" for image in (LARGE, SMALL)]
    common = {"model": "seeing", **SAMPLED, **more}
    if dialect == "responses":
        images = [{"type": "input_image", "image_url": url} for url in urls]
        return common | {"input": [{"role": "user", "content": [*images, {"type": "input_text", "text": QUESTION}]}]}
    if dialect == "messages":
        sources = [{"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]} for url in urls]
        images = [{"type": "image", "source": source} for source in sources]
    else:
        images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return common | {"messages": [{"role": "user", "content": [*images, {"type": "text", "text": QUESTION}]}]}


def limit(dialect: str, n_tokens: int) -> dict[str, int]:
    return {"max_output_tokens" if dialect == "responses" else "max_tokens": n_tokens}


def test_tokens_and_usage_equal_transformers_and_images_are_cached(served: Served) -> None:
    asked = body("chat/completions", max_tokens=N_TOKENS, return_token_ids=True, temperature=0)
    for cached in (0, (len(served.prompt) - 1) // 16 * 16):
        answer = served.post("chat/completions", **asked)
        assert answer["choices"][0]["token_ids"] == served.answer
        assert answer["usage"]["prompt_tokens"] == len(served.prompt)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
    asked |= SAMPLED
    sampled = served.post("chat/completions", **asked)
    url = asked["messages"][0]["content"][0]["image_url"]
    url["url"] = f"data:image/png;base64,{encoded(picture(200, 120, 9))}"
    changed = served.post("chat/completions", **asked)
    assert changed["usage"]["prompt_tokens"] == len(served.prompt)
    assert changed["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert changed["choices"][0]["token_ids"] != sampled["choices"][0]["token_ids"]
    count = served.post("messages/count_tokens", **body("messages"))
    assert count == {"input_tokens": len(served.prompt)}


def test_answer_about_images_survives_the_death_of_its_worker(served: Served) -> None:
    """The text is that of an undisturbed answer, which all dialects share."""
    served.stack.wait_serving(2)
    dialects = ("chat/completions", "responses", "messages")
    expected, *others = (
        _text(dialect, served.post(dialect, "whole", **body(dialect, **limit(dialect, N_LONG)))) for dialect in dialects
    )
    assert others == [expected, expected]
    assert len(expected) > N_LONG / 2
    dialect = "messages"
    asked = body(dialect, **limit(dialect, N_LONG))
    worker, resumes = served.worker_of(dialect), sum(served.stack.resumes().values())
    text, killed, url = "", False, f"{served.stack.url}/v1/{dialect}"
    headers = {"x-session-id": dialect}
    with httpx.stream("POST", url, json=asked | {"stream": True}, headers=headers, timeout=300) as stream:
        for line in stream.iter_lines():
            event = json.loads(line[6:]) if line.startswith("data: {") else {"type": "ping"}
            piece = str(event["delta"].get("text", "")) if event["type"] == "content_block_delta" else ""
            text += piece
            if piece and not killed:
                killed = True
                os.kill(served.stack.rank_pids(worker)[0], signal.SIGKILL)
    assert text == expected
    assert sum(served.stack.resumes().values()) > resumes


def _text(dialect: str, answer: dict[str, Any]) -> str:
    if dialect == "chat/completions":
        return str(answer["choices"][0]["message"]["content"])
    parts = answer["output"][0]["content"] if dialect == "responses" else answer["content"]
    return str(parts[0]["text"])
