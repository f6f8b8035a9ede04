"""A server in a control group of its own, with a rank that eats more memory than the group may have."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from services.compute.ranks.config import RankGroupConfig
from services.worker.process.rank_group import RankGroup
from tests.integration.worker_ranks.conftest import STANDIN, RankConversation
from tests.unit.worker.rank import standin


async def main(group: Path) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()))
    config = RankGroupConfig("misbehave", kv_tokens=1024, max_model_len=256, dtype="float32", rank_module=STANDIN)
    ranks = RankGroup(config)
    await ranks.start()
    RankConversation(ranks, [[1, standin.EAT]]).submit()
    print(await ranks.wait_failed())  # noqa: T201
    await ranks.stop()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
