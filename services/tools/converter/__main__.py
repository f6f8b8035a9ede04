"""Converts a checkpoint: `python -m services.tools.converter`, which `ryzanstein convert` starts.

Writes a line of JSON to stdout for each tensor: {"phase", "done", "of"}, or {"error"} before it ends with status 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from services.compute.model.loading.hub import resolve_model
from services.compute.model.spec import ModelError
from services.tools.converter.run import AUTO, ConversionOptions, convert


def main() -> int:
    """Run the command line; returns the exit status."""
    args = _parser().parse_args()
    try:
        source = resolve_model(args.source)
        request = ConversionOptions(source, Path(args.out).absolute(), args.type, args.shard_bytes, args.force)
        convert(request, lambda done, of: _say({"phase": "convert", "done": done, "of": of}))
    except ModelError as error:
        _say({"error": str(error)})
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m services.tools.converter", allow_abbrev=False)
    parser.add_argument("source")
    parser.add_argument("out")
    parser.add_argument("--type", default=AUTO)
    parser.add_argument("--shard-bytes", type=int, default=5 * 10**9)
    parser.add_argument("--force", action="store_true")
    return parser


def _say(line: dict[str, object]) -> None:
    print(json.dumps(line), flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
