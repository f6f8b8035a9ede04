"""The first call of a tensor's cos, made by two threads of a process, gives each the same accuracy."""

import subprocess
import sys

_LOADS = """
import torch
from pathlib import Path
from services.cli.stack.default_model import default_model
from services.compute.backends.collectives import SingleRank
from services.compute.backends.opening import open_backend
from services.compute.model import build
from services.compute.model.layers import rope
from services.compute.model.registry import describe


def compare(spec, positions):
    cos, sin = rope.rope_tables(spec, positions)
    angles = torch.arange(positions, dtype=torch.float32).unsqueeze(1) * rope.frequencies(spec, positions)
    raise SystemExit(not all(torch.equal(row.cos(), cos[at]) for at, row in enumerate(angles)))


torch.set_num_threads(2)
build.rope_tables = compare
build.load_model(
    describe(Path(default_model().model)), SingleRank(), open_backend(torch.bfloat16, torch.device("cpu"))
)
"""


def test_rope_tables_have_one_accuracy_in_every_process():
    # Only new processes show it, about half of them: MKL chooses its functions once.
    for _ in range(2):
        subprocess.run([sys.executable, "-c", _LOADS], check=True, timeout=300)
