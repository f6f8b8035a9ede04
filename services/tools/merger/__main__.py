"""Merges an adapter into its base: `python -m services.tools.merger`, which `ryzanstein merge` starts.

Writes a line of JSON to stdout for each file: {"phase", "done", "of"}, or {"error"} before it ends with status 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from services.compute.model.loading.hub import resolve_model
from services.compute.model.spec import ModelError
from services.tools.merger.run import merge


def main() -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m services.tools.merger", allow_abbrev=False)
    for name in ("base", "adapter", "out"):
        parser.add_argument(name)
    args = parser.parse_args()
    try:
        out = Path(args.out).absolute()
        merge(resolve_model(args.base), Path(args.adapter), out, lambda done, of: _say("merge", done, of))
    except ModelError as error:
        print(json.dumps({"error": str(error)}), flush=True)  # noqa: T201
        return 1
    return 0


def _say(phase: str, done: int, of: int) -> None:
    print(json.dumps({"phase": phase, "done": done, "of": of}), flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
