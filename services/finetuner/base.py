"""The model that a job starts from: a folder of safetensors, or a GGUF file that is converted to one."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import shutil
import sys
from pathlib import Path

from services.common.gguf_files import split_choice

log = logging.getLogger(__name__)


class BaseError(Exception):
    """The base cannot be trained; the message is for the user."""


async def base_folder(source: str, kept: Path) -> Path:
    """Return a folder of safetensors; a GGUF file is converted once, into `kept`. Raises :class:`BaseError`."""
    folder, ready = await asyncio.to_thread(_look, source, kept)
    if not ready:
        log.info("converting %s", source)
        await _convert(source, folder)
    return folder


def _look(source: str, kept: Path) -> tuple[Path, bool]:
    """The folder of safetensors, and whether it is there; raises :class:`BaseError`."""
    path = Path(split_choice(source)[0])
    if not path.exists():
        raise BaseError(f"there is no {path} where the fine-tuner runs")
    if (path / "config.json").is_file():
        return path, True
    folder = kept / hashlib.sha256(source.encode()).hexdigest()[:16]
    folder.parent.mkdir(parents=True, exist_ok=True)
    return folder, folder.is_dir()


async def _convert(source: str, folder: Path) -> None:
    beside = folder.with_name(f"{folder.name}.{os.getpid()}")
    command = (sys.executable, "-m", "services.worker.converter", source, str(beside), "--type", "BF16", "--force")
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode:
        lines = output.decode(errors="replace").splitlines()
        said = json.loads(lines[-1]).get("error") if lines and lines[-1].startswith("{") else None
        shutil.rmtree(beside, ignore_errors=True)
        raise BaseError(f"{source} was not converted: {said or f'the converter ended with {process.returncode}'}")
    await asyncio.to_thread(beside.rename, folder)
