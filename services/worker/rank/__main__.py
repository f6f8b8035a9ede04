"""`python -m services.worker.rank`: one rank process of a RankGroup."""

from __future__ import annotations

import sys

from services.worker.rank.entry import run_rank


def main() -> int:
    """Run the rank with our own models."""
    return run_rank("services.worker.rank.loading:load")


if __name__ == "__main__":
    sys.exit(main())
