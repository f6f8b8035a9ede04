"""`python -m services.worker.supervision.launch <torchrun arguments>`: torchrun that dies with its parent."""

from __future__ import annotations

import os

from services.worker.supervision.lifeline import PARENT_VARIABLE, die_with_parent


def main() -> None:
    """Tie this process to the server and the ranks to this process, then be torchrun."""
    die_with_parent()
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    from torch.distributed.run import main as torchrun  # torch only after the lifeline is in place

    torchrun()


if __name__ == "__main__":
    main()
