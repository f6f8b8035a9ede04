"""Processes of vLLM do not outlive a server that was killed."""

from __future__ import annotations

import subprocess
import sys

import pytest

SERVER = """
import os, subprocess, sys
from services.worker.vllm.undertaker import Undertaker
children = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
undertaker = Undertaker()
undertaker.watch([child.pid for child in children])
if sys.argv[1] == "killed":
    os.kill(os.getpid(), 9)
undertaker.close()
print(*(child.poll() for child in children))
for child in children:
    child.kill()
"""


@pytest.mark.parametrize("end", ["killed", "closed"])
def test_the_last_named_processes_end_with_a_killed_server(end: str) -> None:
    """The children hold the pipe open, so its end is theirs."""
    server = subprocess.Popen([sys.executable, "-c", SERVER, end], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    output = server.stdout.readline()
    server.wait()
    assert output == ("" if end == "killed" else "None None\n")
