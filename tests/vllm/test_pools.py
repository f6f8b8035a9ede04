"""A pool on vLLM and one of our engine give the same statuses and numbers for the same checkpoint and request."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers
from safetensors.torch import save_file

from services.cli.stack.default_model import TINY_MODEL
from tests.adapters import write_adapter
from tests.stack import RunningStack, running_stack
from tests.vllm.installation import PYTHON, START_S, start_worker

pytestmark = pytest.mark.timeout(3 * START_S)
PYTHONS = {"vllm": PYTHON, "native": sys.executable}
ENGINES = {"vllm": {"ENGINE": "vllm", "ENGINE_ARGS": '{"enforce_eager": true, "block_size": 32}'}, "native": {}}
TEXTS = ["def f(x):", "import os", "a much longer text about nothing in particular, which fills more than one block"]
SHAPE: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,  # vLLM's kernels for CPUs take no heads of 16 numbers
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL = {"name": "look", "parameters": PERSON, "strict": True}
Ask = tuple[str, dict[str, Any]]


def write_bert(kind: str, folder: Path, **config: Any) -> None:
    """A random checkpoint with the tiny model's tokenizer."""
    torch.manual_seed(1)
    model = getattr(transformers, f"Bert{kind}")(transformers.BertConfig(**SHAPE, **config))
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((TINY_MODEL / name).read_bytes())


def embedder(folder: Path) -> list[Ask]:
    """As sentence-transformers stores a model."""
    write_bert("Model", folder)
    kinds = ("Transformer", "Pooling", "Dense", "Normalize")
    paths = ("", *(f"{number}_{kind}" for number, kind in enumerate(kinds[1:], 1)))
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    for path in paths[1:3]:
        (folder / path).mkdir()
    save_file({"linear.weight": torch.randn(24, 64)}, folder / "2_Dense" / "model.safetensors")
    tanh = "torch.nn.modules.activation.Tanh"
    for name, content in (
        ("modules.json", modules),
        ("1_Pooling/config.json", {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": True}),
        ("2_Dense/config.json", {"in_features": 64, "out_features": 24, "bias": False, "activation_function": tanh}),
        ("sentence_bert_config.json", {"max_seq_length": 96}),
        ("config_sentence_transformers.json", {"prompts": {"query": "query: "}, "default_prompt_name": None}),
    ):
        (folder / name).write_text(json.dumps(content))
    return [
        ("embeddings", {"input": TEXTS}),
        ("embeddings", {"input": TEXTS[0], "prompt_name": "query"}),
        ("embeddings", {"input": TEXTS[0], "prompt_name": "none"}),
        ("embeddings", {"input": TEXTS[0], "dimensions": 16}),
        ("embeddings", {"input": TEXTS[0], "dimensions": 24}),
        ("embeddings", {"input": [5, 6, 7]}),
        ("embeddings", {"input": [5, 6, 5000]}),
        ("embeddings", {"input": "x " * 200}),
        ("embeddings", {"input": "x " * 200, "truncate_prompt_tokens": -1}),
        ("score", {"text_1": TEXTS[0], "text_2": TEXTS[1:]}),
        ("classify", {"input": TEXTS}),
        ("completions", {"prompt": "x"}),
    ]


def classifier(folder: Path) -> list[Ask]:
    """Three labels."""
    write_bert("ForSequenceClassification", folder, id2label={0: "good", 1: "bad", 2: "ugly"})
    return [
        ("classify", {"input": TEXTS}),
        ("embeddings", {"input": TEXTS}),
        ("completions", {"prompt": "x"}),
        ("score", {"text_1": TEXTS[0], "text_2": TEXTS[1:]}),
    ]


def reranker(folder: Path) -> list[Ask]:
    """One label, for two texts."""
    write_bert("ForSequenceClassification", folder, id2label={0: "relevance"})
    return [
        ("rerank", {"query": TEXTS[0], "documents": TEXTS}),
        ("score", {"text_1": TEXTS[0], "text_2": TEXTS[1:]}),
        ("classify", {"input": TEXTS}),
    ]


def generator(folder: Path) -> list[Ask]:
    """The tiny model with adapters: log-probabilities, priorities, and what both engines refuse by the same field."""
    for file in TINY_MODEL.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    for name, more in (("good", {}), ("bad", {"use_dora": True})):
        write_adapter(TINY_MODEL, folder / "adapters" / name, {"q_proj": 4, "down_proj": 8}, size=0.2, **more)
    text = {"prompt": TEXTS[0], "max_tokens": 4, "temperature": 0}
    load = {"base_model_name": "", "lora_path": str(folder / "adapters" / "good")}
    return [
        ("completions", {**text, "prompt_logprobs": 2}),
        ("completions", {**text, "echo": True, "logprobs": 3}),
        ("completions", {**text, "priority": 7}),
        ("completions", {**text, "prompt": "x " * 600}),
        ("completions", {**text, "logprobs": 21}),
        ("completions", {**text, "model": "no such adapter"}),
        ("load_lora_adapter", {**load, "lora_name": "tone"}),
        ("completions", {**text, "model": "tone", "logprobs": 2}),
        ("load_lora_adapter", {**load, "lora_name": "tone"}),
        ("load_lora_adapter", {**load, "lora_name": "other", "lora_path": str(folder / "adapters" / "bad")}),
        ("load_lora_adapter", {**load, "lora_name": "other", "lora_path": str(folder / "adapters" / "none")}),
        ("load_lora_adapter", {**load, "lora_name": "other", "lora_path": "/"}),
        ("load_lora_adapter", {**load, "lora_name": "pinned", "pinned": True}),
        ("completions", {**text, "model": "pinned"}),
        ("unload_lora_adapter", {"lora_name": "tone"}),
        ("unload_lora_adapter", {"lora_name": "tone"}),
        ("completions", {**text, "model": "tone"}),
        *structured(),
    ]


def structured() -> list[Ask]:
    """Every kind of grammar, and schemas at the limits of grammars; vLLM bounds no blanks, so long texts have none."""
    text = {"prompt": TEXTS[0], "max_tokens": 300, "temperature": 0}
    deep: dict[str, Any] = {"const": 1}
    for _ in range(80):
        deep = {"type": "array", "items": deep, "minItems": 1, "maxItems": 1}
    tag = {"begin": " <f>", "schema": {"const": 7}, "end": "</f>"}
    tags = {"type": "structural_tag", "triggers": [" "], "structures": [tag]}
    by_schema = {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}}
    patterns = {"patternProperties": {"^x$": {"const": 1}}, "minProperties": 1}
    unique = {"type": "array", "items": {"const": 1}, "uniqueItems": True, "maxItems": 1}
    chat = {"messages": [{"role": "user", "content": "Look."}], "max_tokens": 100, "temperature": 0}
    tools = {**chat, "tools": [{"type": "function", "function": TOOL}]}
    return [
        ("chat/completions", {**chat, **by_schema}),
        ("completions", {**text, "response_format": {"type": "json_object"}, "max_tokens": 40}),
        ("completions", {**text, "structured_outputs": {"json": PERSON, "disable_any_whitespace": True}}),
        ("completions", {**text, "structured_outputs": {"json": deep, "disable_any_whitespace": True}}),
        ("completions", {**text, "guided_regex": "[a-f]{2,5}-[0-9]{3}"}),
        ("completions", {**text, "guided_regex": "("}),
        ("completions", {**text, "guided_choice": ['a "b"', "é\n"]}),
        ("completions", {**text, "guided_grammar": 'start: "a" b\nb: /[xy]{2}/'}),
        ("completions", {**text, "guided_grammar": 'root ::= "\\u0061" b\nb ::= [\\u0078-\\U00000079] [xy]'}),
        ("completions", {**text, "guided_grammar": "start: nothing"}),
        ("completions", {**text, "guided_grammar": "start[max_tokens=3]: /[a-z]*/"}),
        ("completions", {**text, "response_format": tags, "max_tokens": 40}),
        ("completions", {**text, "guided_json": patterns}),
        ("completions", {**text, "guided_json": unique}),
        ("chat/completions", {**tools, "tool_choice": "required"}),
        ("chat/completions", {**tools, "tool_choice": "auto"}),
        ("chat/completions", {**tools, **by_schema}),
    ]


CHECKPOINTS: dict[str, Callable[[Path], list[Ask]]] = {
    one.__name__: one for one in (embedder, generator, reranker, classifier)
}


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    with running_stack(tmp_path_factory.mktemp("run")) as running:
        yield running


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_both_engines_answer_alike(installation: RunningStack, name: str, tmp_path: Path) -> None:
    asks = CHECKPOINTS[name](tmp_path)
    models = {f"{name}-{engine}": engine for engine in ENGINES}
    settings = {"MODEL": str(tmp_path), "DTYPE": "float32", "KV_TOKENS": "4096", "MAX_MODEL_LEN": "96"}
    if name == "generator":
        settings |= {"ADAPTER_SOURCES": str(tmp_path / "adapters"), "ADAPTER_SLOTS": "2", "MAX_MODEL_LEN": "512"}
    workers = [
        start_worker(installation, model, [PYTHONS[engine]], settings | ENGINES[engine] | {"SERVED_MODEL_NAME": model})
        for model, engine in models.items()
    ]
    try:
        wait_routed(installation, models)
        differences = []
        for path, body in asks:
            theirs, ours = (ask(installation, path, body, model) for model in models)
            if difference := unlike(theirs, ours):
                differences.append(f"{path} {str(body)[-200:]}: {difference}")
        assert not differences, "\n".join(differences)
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.wait(60)


def wait_routed(stack: RunningStack, models: dict[str, str]) -> None:
    """Return once the gateway knows both models, and the router sends requests to their workers."""
    deadline = time.monotonic() + START_S
    while not models.keys() <= listed(stack) & {worker.worker_id for worker in stack.workers() if worker.eligible}:
        logs = "".join((stack.folder / "logs" / f"{model}.log").read_text()[-3000:] for model in models)
        assert time.monotonic() < deadline, logs
        time.sleep(0.2)


def listed(stack: RunningStack) -> set[str]:
    return {each["id"] for each in httpx.get(f"{stack.url}/v1/models", timeout=60).json()["data"]}


def ask(stack: RunningStack, path: str, body: dict[str, Any], model: str) -> httpx.Response:
    """Send a body to one of both models; names of adapters end with the model's."""
    own = {key: f"{body[key]} of {model}" for key in ("model", "lora_name") if key in body}
    if path.endswith("_lora_adapter"):
        named = {"base_model_name": model} if "base_model_name" in body else {}
    else:
        named = {"model": model}
    return httpx.post(f"{stack.url}/v1/{path}", json={**body, **named, **own}, timeout=START_S)


def unlike(theirs: httpx.Response, ours: httpx.Response) -> tuple[Any, Any] | None:
    """Both answers if they differ."""
    actual, wanted = theirs.json(), ours.json()
    same = theirs.status_code == ours.status_code and (
        error_of(actual) == error_of(wanted)
        and actual.get("usage") == wanted.get("usage")
        and numbers(actual) == pytest.approx(numbers(wanted), abs=1e-3)
        and texts(actual) == texts(wanted)
    )
    return None if same else (actual, wanted)


def error_of(answer: dict[str, Any]) -> dict[str, Any]:
    return {**answer.get("error", {}), "message": ""}


def numbers(value: Any) -> list[float]:
    """All fractions of an answer, in order."""
    if isinstance(value, float):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [number for part in inner for number in numbers(part)]


def texts(answer: dict[str, Any]) -> list[Any]:
    """The texts of the choices, and their calls."""
    messages = [each.get("message", each) for each in answer.get("choices", ())]
    calls = [[call["function"] for call in message.get("tool_calls") or ()] for message in messages]
    return [
        (message.get("text"), message.get("content"), called) for message, called in zip(messages, calls, strict=True)
    ]
