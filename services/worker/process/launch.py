"""`python -m services.worker.process.launch <torchrun arguments>`: the ranks' parent, which dies with its own.

Several ranks have to find each other: that is torchrun's. A single one has nobody to meet, and torchrun brings torch:
145 MiB of a process that only waits, and its import before the rank's own. It gets what torchrun would have told it.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from types import FrameType

from services.worker.ipc.lifeline import PARENT_VARIABLE, die_with_parent
from services.worker.process.process_info import describe_exit

_REAP_S = 1.0  # as torchrun's monitor interval: the server reads how the rank ended before it is reaped


def main() -> None:
    """Tie this process to the server and the ranks to this process, then be torchrun or what it is for one rank."""
    die_with_parent()
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    options, rank = _parser().parse_known_args()
    if options.nproc_per_node == 1:
        sys.exit(_run_alone(rank))
    from torch.distributed.run import main as torchrun  # torch only after the lifeline is in place

    torchrun()


def _parser() -> argparse.ArgumentParser:
    """Those of torchrun's options that the server gives; what is left is the ranks' command."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--standalone", action="store_true")
    parser.add_argument("--nproc-per-node", type=int, required=True)
    parser.add_argument("--max-restarts", type=int)
    parser.add_argument("--monitor-interval", type=float)
    return parser


def _run_alone(command: list[str]) -> int:
    """Run the only rank until it ends; return its exit status, or as shells do 128 and the signal."""
    told = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    child = subprocess.Popen([sys.executable, *command], env={**os.environ, **told})

    def forward(number: int, _frame: FrameType | None) -> None:
        os.kill(child.pid, number)  # not reaped yet, so the number is its own

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, forward)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    text, _, _ = describe_exit(child.pid)
    time.sleep(_REAP_S)
    status = child.wait()
    if status:
        sys.stderr.write(f"rank 0: {text}\n")
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    main()
