"""`ryzanstein models` and `check`: every reason at once, in the words of a worker that refuses to start."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from services.cli.stack.default_model import TINY_MODEL
from services.common.lifecycle import StartupError
from services.compute.backends.sizing import HostRoom
from services.compute.cpu import has_vectors
from services.compute.model.registry import FAMILIES
from services.tools.checker import report as reports
from services.tools.checker.__main__ import PARTLY, REFUSED, SERVED, main
from services.tools.checker.families import TESTED
from services.worker.native.startup import read_model
from tests.unit.compute.model.tested import as_text
from tests.unit.compute.model.zoo import VARIANTS, write_checkpoint


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["checker", *arguments])
        status = main()
        return status, capsys.readouterr().out

    return call


def changed(folder: Path, **values: Any) -> Path:
    """A copy of the tiny model with other values in its config.json."""
    shutil.copytree(TINY_MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))
    return folder


def test_check_reports_memory_and_servable_ranks(run: Any) -> None:
    status, text = run("check", str(TINY_MODEL), "--ranks", "1,2,7", "--device", "cpu", "--json")
    report = json.loads(text)
    one, two, seven = report["ranks"]
    assert (status, report["servable"], report["problems"]) == (PARTLY, False, [])
    assert one["weights_bytes"] > two["weights_bytes"] > 0
    assert one["kv_bytes_per_1000_tokens"] >= two["kv_bytes_per_1000_tokens"] > 0
    assert [one["problem"], two["problem"]] == ["", ""]
    assert "cannot be divided among 7 ranks" in seven["problem"]
    assert report["nearest"] == ["--tensor-parallel 4"]
    status, text = run("check", str(TINY_MODEL), "--device", "cuda", "--json")
    assert (status, json.loads(text)["dtype"]) == (SERVED, "bfloat16")  # a GPU is not needed for the answer
    status, text = run("check", str(TINY_MODEL), "--device", "cpu")
    assert (status, "1 rank: can be served" in text, "generates and embeds" in text) == (SERVED, True, True)


def test_check_names_the_memory_of_a_state(run: Any, tmp_path: Path) -> None:
    config = VARIANTS["lfm2"]()
    config.vocab_size = 4096
    write_checkpoint(config, tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY_MODEL / name, tmp_path)
    ranks = json.loads(run("check", str(tmp_path), "--ranks", "1,2", "--device", "cpu", "--json")[1])["ranks"]
    assert [one["state_bytes"] for one in ranks] == [3 * 2 * 48 * 4, 3 * 2 * 24 * 4]  # 3 convolutions over 3 tokens
    assert "MiB for a request's state; " in run("check", str(tmp_path), "--device", "cpu")[1]


def test_all_reasons_equal_those_of_a_worker(run: Any, tmp_path: Path) -> None:
    folder = changed(tmp_path / "model", architectures=["LlamaForCausalML"])
    (folder / "tokenizer.json").write_text("{")
    (folder / "model.safetensors").write_bytes(b"\0" * 4)
    status, text = run("check", str(folder), "--json")
    report = json.loads(text)
    assert (status, report["nearest"]) == (REFUSED, ["LlamaForCausalLM"])
    assert len(report["problems"]) == 3, report["problems"]
    with pytest.raises(StartupError) as refused:
        read_model(folder)
    assert str(refused.value) == f"RYZANSTEIN_MODEL {'; '.join(report['problems'])}"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("./nowhere", "./nowhere: no such folder or GGUF file, and not a hub id like owner/name"),
        ("", "'': empty; allowed: a folder, a GGUF file, or a hub id like owner/name"),
        ("org/tiny:Q8_0", "a GGUF file of a hub has to be fetched before it is checked: ryzanstein fetch"),
        ("org/tiny", "org/tiny: not in the local cache, and the hub is not asked or not reached"),
        ("not an id", "not an id: no such folder or GGUF file"),
    ],
)
def test_a_model_that_is_not_found(
    model: str, message: str, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nothing listens
    status, text = run("check", model)
    assert (status, f"{model}: cannot be served\n- " in text, message in text) == (REFUSED, True, True), text


@pytest.mark.parametrize("broken", ["config.json", "m.gguf"])
def test_a_broken_file_is_like_no_architecture(broken: str, run: Any, tmp_path: Path) -> None:
    (tmp_path / broken).write_text("{")
    status, text = run("check", str(tmp_path / broken if broken == "m.gguf" else tmp_path), "--json")
    report = json.loads(text)
    assert (status, report["nearest"]) == (REFUSED, [])
    assert str(tmp_path / broken) in report["problems"][0]


def test_a_classifier_reports_its_number_of_labels(run: Any, tmp_path: Path) -> None:
    folder = changed(tmp_path / "model", architectures=["LlamaForSequenceClassification"], num_labels=3)
    tensors = load_file(folder / "model.safetensors")
    width = tensors["model.norm.weight"].numel()
    save_file(tensors | {"score.weight": torch.zeros(3, width)}, folder / "model.safetensors")
    status, text = run("check", str(folder), "--device", "cpu")
    assert (status, "classifies with 3 labels" in text) == (SERVED, True), text


def test_a_too_large_model_fits_with_smaller_weights_or_more_memory(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(available: int) -> str:
        monkeypatch.setattr(reports, "host_room", lambda: HostRoom(available, None))
        status, text = run("check", str(TINY_MODEL), "--device", "cpu")
        assert (status, "1 rank: cannot be served: RYZANSTEIN_MODEL" in text) == (REFUSED, True), text
        return text

    nothing = answer(0)
    assert nothing.endswith("nearest: a machine with more memory\n")
    needed = int(nothing.partition("ranks need ")[2].partition(" MiB")[0])
    smaller = "--quantization int8" if has_vectors() else "a machine with more memory"
    assert answer((needed - 1) << 20).endswith(f"nearest: {smaller}\n")


def test_missing_tensors_are_found_without_the_memory_of_the_weights(run: Any, tmp_path: Path) -> None:
    """A file of 17 GB with a hole in place of the numbers."""
    folder = changed(tmp_path / "model", num_hidden_layers=1, vocab_size=1 << 20, hidden_size=1 << 12)
    size = 4 << 32
    header = {"model.embed_tokens.weight": {"dtype": "F32", "shape": [1 << 20, 1 << 12], "data_offsets": [0, size]}}
    packed = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(packed).to_bytes(8, "little") + packed)
        file.truncate(8 + len(packed) + size)
    before = psutil.Process().memory_info().rss
    status, text = run("check", str(folder), "--device", "cpu")
    assert (status, "missing" in text) == (REFUSED, True), text
    assert psutil.Process().memory_info().rss - before < 1 << 30


def test_every_servable_architecture_is_listed(run: Any) -> None:
    status, text = run("models", "--json")
    listed = json.loads(text)
    assert [family["architecture"] for family in listed["families"]] == list(FAMILIES)
    does = {family["model_type"]: family["does"] for family in listed["families"]}
    assert (status, does["bert"], does["llama"]) == (SERVED, ["embed", "classify"], ["generate", "embed", "classify"])
    _, text = run("models")
    assert "GPTQ" in text
    assert "each needs: config.json" in text
    described = text[text.index("GptOssForCausalLM (gpt_oss)") :].splitlines()[1]
    assert "ranks divide attention heads, KV heads, experts" in described
    assert "attention sinks" in described


def test_the_list_equals_the_tested_models(run: Any) -> None:
    """`make reference` writes it."""
    assert TESTED.read_text() == as_text()
    _, text = run("models", "--json")
    families = json.loads(text)["families"]
    assert all(family["random"] and family["divided"] for family in families)
    (llama,) = (family for family in families if family["model_type"] == "llama")
    assert (llama["formats"], "longrope rope" in llama["features"]) == (["safetensors", "GGUF"], False)
    assert {"llama3 rope", "yarn rope"} <= set(llama["features"])
