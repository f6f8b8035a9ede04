"""Merges an adapter into its base: `python -m services.tools.merger REQUEST`, which `ryzanstein merge` starts."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from services.compute.model.loading.hub import resolve_model
from services.tools.merger.run import merge
from services.tools.program import Progress, run


def merge_model(request: dict[str, str], progress: Progress) -> None:
    """Merge `adapter` into `base` as `out`; counts files. Raises ModelError."""
    out = Path(request["out"]).absolute()
    merge(resolve_model(request["base"]), Path(request["adapter"]), out, partial(progress, "merge"))


if __name__ == "__main__":
    sys.exit(run(merge_model))
