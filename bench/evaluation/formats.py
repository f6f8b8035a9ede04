"""Number formats of weights and of the KV cache, each with the checkpoint that stores it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

# The quantizer's options of each format.
QUANTIZED: dict[str, dict[str, object]] = {
    "int8": {"method": "rtn", "bits": 8},
    "int8-g32": {"method": "rtn", "bits": 8, "group": 32},
    "int4-rtn": {"method": "rtn", "bits": 4},
    "int4-gptq": {"method": "gptq", "bits": 4},
    "int4-awq": {"method": "awq", "bits": 4},
    "int4-gptq-mixed": {"method": "gptq", "bits": 4, "extra": 0.1},
}
DENSE = {"bf16": "bfloat16", "f32": "float32"}
AT_LOAD = {"load-int8": "int8", "load-int4": "int4"}  # values of --quantization
FORMATS = (*DENSE, *QUANTIZED, *AT_LOAD, "stored")
REFERENCE = "f32"
_DEFAULTS = {"group": None, "extra": 0.0, "symmetric": True, "samples": 16, "length": 256, "device": "auto"}


@dataclass(frozen=True)
class Row:
    """One way to store and to compute a model."""

    name: str
    model: Path
    dtype: str = "bfloat16"
    kv_format: str = "auto"
    quantization: str = "auto"


def find_rows(
    names: Sequence[str],
    kv_formats: Sequence[str],
    model: Path,
    stored: Path | None,
    work: Path,
    held_out: Collection[str],
) -> list[Row]:
    """Return the rows, for which missing checkpoints are quantized in `work`. Raises ValueError, CalledProcessError."""
    rows = []
    for name in names:
        if name not in FORMATS:
            raise ValueError(f"--format {name}: allowed: {', '.join(FORMATS)}")
        if name in DENSE:
            rows.append(Row(name, model, DENSE[name]))
        elif name in AT_LOAD:
            rows.append(Row(f"bf16, --quantization {AT_LOAD[name]}", model, quantization=AT_LOAD[name]))
        elif name == "stored":
            if stored is None:
                raise ValueError("--format stored: give --stored, the checkpoint as it is stored")
            rows.append(Row(f"stored: {stored.name}", stored))
        else:
            rows.append(Row(name, _quantized(name, model, work, held_out)))
    return rows + [Row(f"bf16, KV {name}", model, kv_format=name) for name in kv_formats]


def _quantized(name: str, model: Path, work: Path, held_out: Collection[str]) -> Path:
    """Return the checkpoint of a format, made from Python's help without the held-out topics unless it is there."""
    out = work / f"{model.name}-{name}"
    if not out.exists():
        texts = [text for topic, text in sorted(topics.items()) if f"pydoc_data/topics.py#{topic}" not in held_out]
        calibration = work / "calibration.jsonl"
        calibration.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        paths = {"model": str(model), "out": str(out), "calibration": str(calibration)}
        request = json.dumps({**_DEFAULTS, **QUANTIZED[name], **paths})
        command = [sys.executable, "-m", "services.tools.quantizer", request]
        subprocess.run(command, check=True, stdout=sys.stderr)
    return out


def stored_mib(row: Row) -> float:
    """Return the size of a row's weights on disk, in MiB."""
    files = row.model.glob("*.safetensors") if row.model.is_dir() else [row.model]
    return sum(file.stat().st_size for file in files) / 2**20
