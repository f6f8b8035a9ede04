"""Processes of vLLM do not outlive a server that was killed."""

from __future__ import annotations

import subprocess
import sys

import pytest

SERVER = """
import os, subprocess, sys
from services.worker.vllm.orphan_reaper import OrphanReaper
children = [subprocess.Popen(["sleep", "60"]), subprocess.Popen("sleep 60; true", shell=True, start_new_session=True)]
reaper = OrphanReaper()
reaper.watch([children[0].pid, -children[1].pid])
if sys.argv[1] == "killed":
    os.kill(os.getpid(), 9)
reaper.close()
print(*(child.poll() for child in children))
children[0].kill()
os.killpg(children[1].pid, 9)
"""


@pytest.mark.parametrize("end", ["killed", "closed"])
def test_the_last_named_processes_end_with_a_killed_server(end: str) -> None:
    """The children, and that of one of them, hold the pipe open, so its end is theirs."""
    server = subprocess.Popen([sys.executable, "-c", SERVER, end], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    output = server.stdout.readline()
    server.wait()
    assert output == ("" if end == "killed" else "None None\n")
