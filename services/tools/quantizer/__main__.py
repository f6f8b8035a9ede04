"""Quantizes a checkpoint: `python -m services.tools.quantizer`, which `ryzanstein quantize` starts.

Writes a line of JSON to stdout for each step: {"phase", "done", "of"}, a {"note"} about the result, or
{"error"} before it ends with status 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from services.compute.model.loading.hub import resolve_model
from services.compute.model.spec import ModelError
from services.tools.quantizer.methods.registry import METHODS
from services.tools.quantizer.run import QuantizationOptions, quantize


def main() -> int:
    """Run the command line; returns the exit status."""
    args = _parser().parse_args()
    try:
        model = resolve_model(args.model)
        request = QuantizationOptions(
            model,
            Path(args.out).absolute(),
            args.method,
            args.bits,
            args.group,
            args.extra,
            symmetric=not args.asymmetric,
            calibration=Path(args.calibration) if args.calibration else None,
            samples=args.samples,
            length=args.length,
        )
        note = quantize(request, _device(args.device), _report)
    except ModelError as error:
        _say({"error": str(error)})
        return 1
    if note:
        _say({"note": note})
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m services.tools.quantizer", allow_abbrev=False)
    parser.add_argument("model")
    parser.add_argument("--out", required=True)
    parser.add_argument("--method", choices=METHODS, default="gptq")
    parser.add_argument("--bits", type=int, choices=(4, 8), default=4)
    parser.add_argument("--group", type=int)
    parser.add_argument("--extra", type=float, default=0.0)
    parser.add_argument("--asymmetric", action="store_true")
    parser.add_argument("--calibration")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    return parser


def _device(name: str) -> torch.device:
    """Return the device; `auto` takes a GPU if there is one. Raises ModelError."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelError("--device cuda: this machine has no usable CUDA device; allowed: auto, cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def _report(phase: str, done: int, of: int) -> None:
    _say({"phase": phase, "done": done, "of": of})


def _say(line: dict[str, object]) -> None:
    print(json.dumps(line), flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
