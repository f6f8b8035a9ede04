"""A model's folder is one value: each file is read once, and every problem is named once."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest

from services.compute.model.loading.folder import open_folder
from services.compute.model.spec import ModelError
from services.compute.ranks.config import RankGroupConfig
from services.worker.native.opening import served_model
from tests.models import BUNDLED_MODEL


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(BUNDLED_MODEL, tmp_path / "model"))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The number of times that each file's whole content was read, by name."""
    counted: Counter[str] = Counter()
    read_text, read_bytes = Path.read_text, Path.read_bytes

    def counting_text(path: Path, encoding: str | None = None) -> str:
        counted[path.name] += 1
        return read_text(path, encoding)

    def counting_bytes(path: Path) -> bytes:
        counted[path.name] += 1
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_text", counting_text)
    monkeypatch.setattr(Path, "read_bytes", counting_bytes)
    return counted


@pytest.mark.parametrize("vocab_size", [None, 1000])
def test_small_files_are_read_once(vocab_size: int | None, folder: Path, reads: Counter[str]) -> None:
    for name, content in (("modules", []), ("config_sentence_transformers", {}), ("generation_config", {"top_k": 5})):
        (folder / f"{name}.json").write_text(json.dumps(content))
    model = open_folder(folder, vocab_size=vocab_size).require()
    assert (model.sampling.top_k, bool(model.eos_token_ids), bool(model.identity)) == (5, True, True)
    if vocab_size is None:
        served_model(model, RankGroupConfig(str(folder), kv_tokens=1))
    assert set(reads.values()) == {1}, reads
    assert {"config.json", "tokenizer_config.json", "tokenizer.json", "generation_config.json"} <= reads.keys()


def test_each_problem_is_named_once(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["Unknown"]}))
    broken = (
        "tokenizer_config",
        "generation_config",
        "sentence_bert_config",
        "config_sentence_transformers",
        "modules",
    )
    for name in broken:
        (folder / f"{name}.json").write_text("{")
    (folder / "model.safetensors").write_bytes(b"\0" * 4)
    problems = open_folder(folder).problems
    assert sorted(Path(problem.split(": ")[0]).stem for problem in problems) == sorted(("config", "model", *broken))
    with pytest.raises(ModelError) as refused:
        open_folder(folder).require()
    assert str(refused.value) == "; ".join(problems)


def test_other_engines_models_need_no_family_of_ours(folder: Path) -> None:
    ours = open_folder(folder).require()
    config = json.loads((folder / "config.json").read_text())
    text = {"text_config": {"eos_token_id": [3, 10**6]}, "architectures": ["Unknown"]}
    (folder / "config.json").write_text(json.dumps({**config, **text}))
    (folder / "modules.json").write_text("{")  # only our own engine reads it
    other = open_folder(folder, vocab_size=ours.spec.vocab_size).require()
    assert (other.tokenizer, 3 in other.eos_token_ids, 10**6 in other.eos_token_ids) == (ours.tokenizer, True, False)
    assert other.identity != ours.identity
    with pytest.raises(ModelError, match="'Unknown' is not implemented"):
        open_folder(folder).require()


def test_absent_weights_are_no_problem_of_a_folder_of_small_files(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert open_folder(folder, whole=False).problems == ()
    assert "neither model.safetensors nor" in "; ".join(open_folder(folder).problems)
