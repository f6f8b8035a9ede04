"""`python -m services.worker.process.launch <torchrun arguments>`: runs torchrun and dies with its parent.

Several ranks have to find each other and need one parent process that ends them.
"""

from __future__ import annotations

import os

from services.common.heap import uncollected
from services.common.lifeline import PARENT_VARIABLE, die_with_parent


def main() -> None:
    """Tie this process to the server and the ranks to this process, then be torchrun."""
    die_with_parent()
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    with uncollected():
        from torch.distributed.run import main as torchrun  # torch only after the lifeline is in place

    torchrun()


if __name__ == "__main__":
    main()
