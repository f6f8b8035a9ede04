"""`ryzanstein models` and `ryzanstein check`: the worker's checker, which reads no weights."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from services.cli.errors import CommandError
from services.common.extras import pip_install

_MODULE = "services.tools.checker"
_NEEDED = ("safetensors", "tokenizers", "torch")
WRONG = 2  # exit status of a command without a result about the model
_COUNTS = re.compile(r"[1-9]\d{0,2}(,[1-9]\d{0,2})*")


def parse_counts(text: str) -> str:
    """Return the numbers of ranks in `--ranks`; raises CommandError."""
    counts = text.replace(" ", "")
    if not _COUNTS.fullmatch(counts):
        raise CommandError(f"--ranks {text}: expected numbers from 1 to 999, such as 1,2,4", status=WRONG)
    return counts


def run(arguments: Sequence[str]) -> int:
    """Run the checker, which prints its answer; returns its exit status. Raises CommandError."""
    if missing := [name for name in _NEEDED if not find_spec(name)]:
        install = pip_install("worker", f"{sys.executable} -m pip")
        message = f"{arguments[0]} needs the extra worker ({', '.join(missing)} missing): {install}"
        raise CommandError(message, status=WRONG)
    return subprocess.call([sys.executable, "-m", _MODULE, *arguments])
