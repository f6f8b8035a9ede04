"""What a wake need not do again: weights whose files have not changed are known to be finite."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.compute.backends.collectives import SingleRank
from services.compute.backends.opening import open_backend
from services.compute.model.spec import ModelError
from services.compute.ranks.config import RankGroupConfig
from services.worker.rank.loading import load
from tests.models import BUNDLED_MODEL


def test_weights_are_checked_again_only_if_their_files_have_changed(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(BUNDLED_MODEL, tmp_path / "model"))
    config = RankGroupConfig(str(folder), kv_tokens=1024, max_model_len=256, dtype="float32")
    backend, comm = open_backend(torch.float32, torch.device("cpu"), None, triton=False, graphs=False), SingleRank()
    first = load(config, comm, backend)
    file = folder / "model.safetensors"
    before, tensors = file.stat(), load_file(file)
    next(iter(tensors.values())).view(-1)[0] = float("nan")
    save_file(tensors, tmp_path / "broken", {"format": "pt"})
    file.write_bytes((tmp_path / "broken").read_bytes())
    with pytest.raises(ModelError, match="which is not finite"):
        load(config, comm, backend, first.files)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    if file.stat().st_size == before.st_size:
        assert load(config, comm, backend, first.files).files == first.files, "the same file, as far as its state says"
    with pytest.raises(ModelError, match="which is not finite"):
        load(config, comm, backend)
