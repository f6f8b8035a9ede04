"""A picture of a terminal: runs a command as if somebody looked at it, and draws what it printed.

python docs/pictures/terminal.py docs/pictures/status.svg ryzanstein status
"""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys

from rich.console import Console
from rich.text import Text

COLUMNS = 140


def printed_by(command: list[str]) -> str:
    """The output of COMMAND on a terminal, colours included; raises CalledProcessError when it fails."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    running = subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    parts = []
    try:
        while part := os.read(ours, 1 << 16):
            parts.append(part)
    except OSError:  # how a terminal says that no process writes to it any more
        pass
    if running.wait():
        raise subprocess.CalledProcessError(running.returncode, command)
    return b"".join(parts).decode().replace("\r\n", "\n")


def draw(command: list[str], path: str) -> None:
    """Write an SVG of COMMAND and its output."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text(f"$ {' '.join(command)}", style="bold"))
    console.print(Text.from_ansi(printed_by(command)))
    console.save_svg(path, title="ryzanstein", unique_id="terminal")


if __name__ == "__main__":
    draw(sys.argv[2:], sys.argv[1])
