"""Work that a wake need not repeat: unchanged files are known."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.make_checkpoint import Shape, write_checkpoint
from services.compute.backends.collectives import SingleRank
from services.compute.backends.opening import open_backend
from services.compute.model.loading import folder as folders
from services.compute.model.loading.folder import KnownFiles
from services.compute.model.registry import Description, describe
from services.compute.model.spec import ModelError
from services.compute.ranks.config import RankGroupConfig
from services.tools.converter.run import AUTO, ConversionOptions, convert
from services.worker.rank.awake import LoadedModel
from services.worker.rank.loading import load
from tests.models import BUNDLED_MODEL


def load_from(path: Path, known: KnownFiles | None = None) -> LoadedModel:
    config = RankGroupConfig(str(path), kv_tokens=1024, max_model_len=256, dtype="float32")
    backend = open_backend(torch.float32, torch.device("cpu"), None, triton=False, graphs=False)
    return load(config, SingleRank(), backend, known)


def test_weights_are_checked_again_only_if_their_files_have_changed(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(BUNDLED_MODEL, tmp_path / "model"))
    first = load_from(folder)
    file = folder / "model.safetensors"
    before, tensors = file.stat(), load_file(file)
    next(iter(tensors.values())).view(-1)[0] = float("nan")
    save_file(tensors, tmp_path / "broken", {"format": "pt"})
    file.write_bytes((tmp_path / "broken").read_bytes())
    with pytest.raises(ModelError, match="which is not finite"):
        load_from(folder, first.files)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    if file.stat().st_size == before.st_size:
        assert load_from(folder, first.files).files == first.files, "the same file, as far as its state says"
    with pytest.raises(ModelError, match="which is not finite"):
        load_from(folder)


def test_header_of_an_unchanged_file_is_read_once_and_kept_without_its_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.gguf"
    write_checkpoint(Shape(64, 1, 2, 2, 128, 512, tied=True, head_dim=32), tmp_path / "folder")
    convert(ConversionOptions(tmp_path / "folder", file, AUTO, shard_bytes=1 << 30, force=False), lambda *_: None)
    reads: list[Path] = []

    def counted(path: Path) -> Description:
        reads.append(path)
        return describe(path)

    monkeypatch.setattr(folders, "describe", counted)
    first = load_from(file)
    again = load_from(file, first.files)
    assert (reads, again.files) == ([file], first.files)
    assert again.facts == first.facts
    assert first.files is not None
    assert first.files.description.gguf is not None
    metadata = first.files.description.gguf.metadata
    assert "tokenizer.ggml.model" in metadata
    assert "tokenizer.ggml.tokens" not in metadata
    file.touch()
    load_from(file, first.files)
    assert reads == [file, file]
