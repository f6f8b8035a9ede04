"""The files next to the weights of a checkpoint reach the answers of the API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
import transformers

from tests.stack import RunningStack, running_stack
from tests.unit.compute.model.zoo import VARIANTS, prompt, write_checkpoint
from tests.unit.gateway.made_tokenizers import byte_level

SERVED = 32  # the context that the model was first trained for; LongRoPE stretches it to 128
TOKENS = byte_level().get_vocab_size()
BOS = byte_level().token_to_id("<|bos|>")


def _write(folder: Path) -> transformers.PreTrainedModel:
    """A LongRoPE model with a chat token, a BOS and a pooling that only the files next to it name."""
    config = VARIANTS["phi3_longrope"]()
    config.vocab_size = TOKENS + 1
    model = write_checkpoint(config, folder)
    byte_level().save(str(folder / "tokenizer.json"))
    template = "{{ bos_token }}{% for m in messages %}<|turn|>{{ m.content }}{% endfor %}"
    files = {
        "added_tokens.json": {"<|turn|>": TOKENS},
        "special_tokens_map.json": {"bos_token": "<|bos|>", "additional_special_tokens": ["<|turn|>"]},
        "tokenizer_config.json": {"chat_template": template, "add_bos_token": True},
        "modules.json": [
            {"path": "", "type": "sentence_transformers.models.Transformer"},
            {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        ],
        "1_Pooling/config.json": {"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True},
    }
    (folder / "1_Pooling").mkdir()
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return model


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningStack, transformers.PreTrainedModel]]:
    folder = tmp_path_factory.mktemp("longrope")
    model = _write(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RYZANSTEIN_MAX_MODEL_LEN", str(SERVED))
        options = ("--dtype", "float32", "--kv-tokens", "1024")
        with running_stack(tmp_path_factory.mktemp("run"), *options, model=str(folder)) as stack:
            yield stack, model


def test_the_served_length_chooses_the_factors(served: tuple[RunningStack, transformers.PreTrainedModel]) -> None:
    """Within the original context the model is computed as it was trained: with the short factors."""
    stack, model = served
    ids, n = prompt(20), SERVED - 20
    answer = stack.complete(prompt=ids, max_tokens=n, temperature=0, logprobs=0, return_token_ids=True, ignore_eos=True)
    assert answer.status_code == httpx.codes.OK, answer.text
    choice = answer.json()["choices"][0]
    whole = [*ids, *choice["token_ids"]]
    with torch.no_grad():
        scores = model(torch.tensor([whole])).logits[0].log_softmax(dim=-1)[len(ids) - 1 : -1]
    assert choice["token_ids"] == scores.argmax(dim=-1).tolist()
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(scores.max(dim=-1).values.tolist(), abs=1e-3)
    assert (
        f"longrope, theta 10000, tables of {SERVED} positions, short factors"
        in (stack.folder / "logs" / "worker-0.log").read_text()
    )


def test_tokens_and_names_from_the_files_beside_the_tokenizer(
    served: tuple[RunningStack, transformers.PreTrainedModel],
) -> None:
    stack, _ = served

    def tokenize(**body: object) -> list[int]:
        answer = httpx.post(f"{stack.url}/tokenize", json=body, timeout=60)
        assert answer.status_code == httpx.codes.OK, answer.text
        ids: list[int] = answer.json()["tokens"]
        return ids

    assert tokenize(messages=[{"role": "user", "content": "a"}])[:2] == [BOS, TOKENS]
    plain, spelled = tokenize(prompt="a list"), tokenize(prompt="<|bos|>a list")
    assert plain == spelled
    assert plain.count(BOS) == 1


def test_the_checkpoints_own_pooling(served: tuple[RunningStack, transformers.PreTrainedModel]) -> None:
    stack, model = served
    ids = prompt(24)
    answer = httpx.post(f"{stack.url}/v1/embeddings", json={"model": stack.model(), "input": ids}, timeout=60)
    assert answer.status_code == httpx.codes.OK, answer.text
    with torch.no_grad():
        hidden = model.model(torch.tensor([ids])).last_hidden_state[0]
    assert answer.json()["data"][0]["embedding"] == pytest.approx(hidden[-1].tolist(), abs=1e-3)
