"""The model that a job starts from: a folder of safetensors, or a GGUF file that is converted to one."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

from services.common.gguf_files import split_choice
from services.finetuner.training.messages import RefusedError


class BaseError(RefusedError):
    """The base cannot be trained; the message is for the user."""

    code, param = "base_unavailable", "model"


def base_folder(source: str, converted: Path, job_id: str) -> Path:
    """Return a folder of safetensors; a GGUF file is converted once, into `converted`. Raises :class:`BaseError`."""
    path = Path(split_choice(source)[0])
    if not path.exists():
        raise BaseError(f"there is no {path} where the training runs")
    if (path / "config.json").is_file():
        return path
    folder = converted / hashlib.sha256(source.encode()).hexdigest()[:16]
    if not folder.is_dir():
        _convert(source, folder, folder.with_name(f".{folder.name}.{job_id}"))
    return folder


def _convert(source: str, folder: Path, unfinished: Path) -> None:
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    request = json.dumps({"source": source, "out": str(unfinished), "kind": "BF16", "force": True})
    command = (sys.executable, "-m", "services.tools.converter", request)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, errors="replace", check=False)
    if done.returncode:
        lines = done.stdout.splitlines()
        reason = json.loads(lines[-1]).get("error") if lines and lines[-1].startswith("{") else None
        shutil.rmtree(unfinished, ignore_errors=True)
        raise BaseError(f"{source} was not converted: {reason or f'the converter ended with {done.returncode}'}")
    try:
        unfinished.rename(folder)
    except OSError:
        if not folder.is_dir():  # another job has converted it meanwhile
            raise
        shutil.rmtree(unfinished)
