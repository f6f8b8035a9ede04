"""Nothing is left of vLLM's processes in a container whose first process is ours."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Like a container's first process, it becomes the parent of processes that have lost theirs.
SERVER = """
import ctypes, multiprocessing, os, subprocess, sys, time
import psutil
from services.worker.vllm.family import families, kill, reap

ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER

def scheduler(ready):
    rank = subprocess.Popen(["sleep", "600"])
    ready.set()
    rank.wait()

ready = multiprocessing.Event()
child = multiprocessing.Process(target=scheduler, args=(ready,))
child.start()
ready.wait()
family = families([child])
if sys.argv[1] == "scheduler lost":
    child.kill()
    child.join()
kill([child], family)
reap([child], family, 60.0)
print(len(family), psutil.Process().children(recursive=True))
"""


@pytest.mark.parametrize("case", ["all killed", "scheduler lost"])
def test_the_killed_are_no_zombies(case: str) -> None:
    done = subprocess.run([sys.executable, "-c", SERVER, case], capture_output=True, text=True, check=True)
    assert done.stdout == "2 []\n"
