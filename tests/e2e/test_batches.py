"""A file of requests through the whole stack, with OpenAI's client, beside a user who does not wait for it."""

from __future__ import annotations

import json
import time
from typing import Any

import openai

from tests.stack import RunningStack

PROMPTS = [f"def f{number}(n):" for number in range(24)]


def completion(prompt: str) -> dict[str, Any]:
    return {"model": "ryzanstein-tiny", "prompt": prompt, "max_tokens": 24, "temperature": 0}


def test_a_batch_gives_the_answers_that_its_requests_get_alone(stack: RunningStack) -> None:
    client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key="unused")
    lines = [
        json.dumps({"custom_id": prompt, "method": "POST", "url": "/v1/completions", "body": completion(prompt)})
        for prompt in PROMPTS
    ]
    file = client.files.create(file=("requests.jsonl", "\n".join(lines).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    alone = {prompt: client.completions.create(**completion(prompt)).choices[0].text for prompt in PROMPTS[:3]}
    deadline = time.monotonic() + 180
    while (batch := client.batches.retrieve(batch.id)).status not in ("completed", "failed", "expired"):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.completed == len(PROMPTS)
    answers = [json.loads(line) for line in client.files.content(batch.output_file_id or "").text.splitlines()]
    texts = {answer["custom_id"]: answer["response"]["body"]["choices"][0]["text"] for answer in answers}
    assert len(texts) == len(answers) == len(PROMPTS)
    assert {prompt: texts[prompt] for prompt in alone} == alone
    assert client.batches.list().data[0].id == batch.id
    for file_id in (file.id, batch.output_file_id or ""):
        assert client.files.delete(file_id).deleted
