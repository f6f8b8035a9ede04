"""A rank of the stand-in: as the real one, it imports torch after its link is open."""

from __future__ import annotations

import sys

from services.worker.rank.entry import run_rank

if __name__ == "__main__":
    sys.exit(run_rank("tests.unit.worker.rank.standin:load"))
