"""Checkpoints that several tests share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
import transformers

from tests.unit.compute.model.zoo import write_checkpoint


def written_once(
    configs: Mapping[str, Callable[[], transformers.PretrainedConfig]],
    root: pytest.TempPathFactory,
    dtype: torch.dtype = torch.float32,
) -> Callable[[str], Path]:
    """Return a function from names of `configs` to folders, which it writes at their first use."""

    @functools.cache
    def write(name: str) -> Path:
        folder = root.mktemp(name)
        write_checkpoint(configs[name](), folder).to(dtype).save_pretrained(folder)
        return folder

    return write
