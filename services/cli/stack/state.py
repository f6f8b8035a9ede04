"""The file that describes a running installation, for `status` and `down`."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from services.cli.errors import CommandError


@dataclass(frozen=True, slots=True)
class StackState:
    """A running local installation."""

    pid: int  # the supervisor's
    created: float  # the supervisor's start time, which detects a reused pid
    url: str
    router: str
    coordinator: str
    processes: dict[str, int]  # name -> pid
    supervised: bool  # False during the first start, when a process that ends is an error; later it is restarted


def run_dir(port: int) -> Path:
    """The folder of the installation on `port`: state, logs, sockets. Created on first use, for this user only."""
    base = os.environ.get("XDG_RUNTIME_DIR") or f"/tmp/ryzanstein-{os.getuid()}"
    folder = Path(base) / "ryzanstein" / str(port)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if folder.stat().st_uid != os.getuid():
        raise CommandError(f"{folder} belongs to another user")
    return folder


def write_state(folder: Path, state: StackState) -> None:
    """Replace the state file atomically."""
    temporary = folder / "stack.json.new"
    temporary.write_text(json.dumps(asdict(state), indent=2))
    temporary.rename(folder / "stack.json")


def read_state(port: int) -> StackState:
    """The installation on `port`; raises :class:`CommandError` if none runs there."""
    path = run_dir(port) / "stack.json"
    try:
        state = StackState(**json.loads(path.read_text()))
        alive = psutil.Process(state.pid).create_time() == state.created
    except (FileNotFoundError, psutil.NoSuchProcess):
        alive = False
    if not alive:
        raise CommandError(f"nothing runs on port {port}; start it with: ryzanstein up --port {port}")
    return state
