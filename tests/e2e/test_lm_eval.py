"""lm-eval's own command scores tasks on local data through `local-completions`, as `transformers` scores them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.cli.stack.default_model import TINY_MODEL
from tests.stack import RunningStack

LM_EVAL = str(Path(sys.executable).parent / "lm_eval")
TOLERANCE = 1e-3  # per token
DOCS, CONTEXT, ENDING, TEXT = 8, 400, 40, 1_500  # documents, and characters of each
NEW_TOKENS = 12

# {data} is the file of documents. Each task asks in another way: continuations of a context that compete, whole texts
# in windows, and text up to a stop string.
TASKS = {
    "endings": """
task: endings
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: context
doc_to_choice: endings
doc_to_target: right
target_delimiter: ""
metric_list: [{{metric: acc}}]
""",
    "texts": """
task: texts
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: text
metric_list: [{{metric: bits_per_byte}}]
""",
    "lines": """
task: lines
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: context
doc_to_target: ending
generation_kwargs: {{until: ["\\n\\n"], max_gen_toks: 12, do_sample: false}}
metric_list: [{{metric: exact_match}}]
""",
}


@cache
def documents() -> list[dict[str, Any]]:
    """Held-out texts: the beginning of each, its own ending among those of two others, and more of it."""
    with (TINY_MODEL / "heldout.jsonl").open() as lines:
        texts = [text for text in (json.loads(line)["text"] for line in lines) if len(text) > TEXT][:DOCS]
    endings = [text[CONTEXT : CONTEXT + ENDING] for text in texts]
    return [
        {
            "context": text[:CONTEXT],
            "ending": endings[i],
            "endings": [endings[(i + shift - i % 3) % DOCS] for shift in range(3)],
            "right": i % 3,
            "text": text[:TEXT],
        }
        for i, text in enumerate(texts)
    ]


class TransformersScores:
    """The same scores from `transformers` alone."""

    def __init__(self) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
        self.model = AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return ids

    def score(self, ids: list[int], scored: int) -> tuple[float, bool]:
        """Log-likelihood of the last `scored` tokens, and whether each of them was the likeliest."""
        with torch.inference_mode():
            rows = torch.log_softmax(self.model(torch.tensor([ids])).logits[0, -scored - 1 : -1], dim=-1)
        following = torch.tensor(ids[-scored:])
        return float(rows.gather(1, following[:, None]).sum()), bool((rows.argmax(-1) == following).all())

    def ending(self, context: str, ending: str) -> tuple[float, bool, int]:
        """As lm-eval splits them: the context without white space at its end, then the rest of the tokens of both."""
        before = self.encode(context.rstrip())
        after = self.encode(context + ending)[len(before) :]
        return *self.score(before + after, len(after)), len(after)

    def generate(self, context: str) -> str:
        """Greedy, up to an empty line."""
        ids = self.encode(context)
        with torch.inference_mode():
            out = self.model.generate(torch.tensor([ids]), max_new_tokens=NEW_TOKENS, do_sample=False)
        text: str = self.tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True)
        return text.split("\n\n")[0]


@pytest.fixture(scope="module")
def reference() -> TransformersScores:
    return TransformersScores()


@pytest.fixture(scope="module")
def results(float32_stack: RunningStack, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """The command's results for every document of every task, in the documents' order."""
    folder = tmp_path_factory.mktemp("lm-eval")
    (folder / "documents.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents()))
    for name, task in TASKS.items():
        (folder / f"{name}.yaml").write_text(task.format(data=folder / "documents.jsonl"))
    arguments = f"base_url={float32_stack.url}/v1/completions,tokenizer={TINY_MODEL},num_concurrent=4,max_retries=1"
    command = [LM_EVAL, "run", "--model", "local-completions", "--model_args", f"model=ryzanstein-tiny,{arguments}"]
    command += ["--tasks", ",".join(TASKS), "--include_path", str(folder), "--output_path", str(folder / "out")]
    command += ["--log_samples", "--batch_size", "4"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "cache"), "NO_PROXY": "*"}
    done = subprocess.run(command, env=os.environ | offline, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    actual = {}
    for name in TASKS:
        (samples,) = (folder / "out").glob(f"**/samples_{name}_*.jsonl")
        actual[name] = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda sample: sample["doc_id"])
        assert len(actual[name]) == DOCS
    return actual


def test_likelihoods_of_endings_equal_those_of_transformers(
    results: dict[str, list[dict[str, Any]]], reference: TransformersScores
) -> None:
    for document, sample in zip(documents(), results["endings"], strict=True):
        expected = [reference.ending(document["context"], ending) for ending in document["endings"]]
        for (score, greedy), (likelihood, likeliest, tokens) in zip(sample["filtered_resps"], expected, strict=True):
            assert float(score) == pytest.approx(likelihood, abs=TOLERANCE * tokens)
            assert (str(greedy) == "True") == likeliest
        best = max(range(len(expected)), key=lambda choice: expected[choice][0])
        assert sample["acc"] == float(best == document["right"])


def test_bits_per_byte_of_texts_equal_those_of_transformers(
    results: dict[str, list[dict[str, Any]]], reference: TransformersScores
) -> None:
    for document, sample in zip(documents(), results["texts"], strict=True):
        ids = reference.encode(document["text"])
        likelihood, _ = reference.score([reference.tokenizer.bos_token_id, *ids], len(ids))
        score, size = sample["bits_per_byte"]
        assert size == len(document["text"].encode())
        assert float(score) == pytest.approx(likelihood, abs=TOLERANCE * len(ids))


def test_generated_text_ends_at_the_stop_string(
    results: dict[str, list[dict[str, Any]]], reference: TransformersScores
) -> None:
    for document, sample in zip(documents(), results["lines"], strict=True):
        assert sample["filtered_resps"] == [reference.generate(document["context"])]
