"""A server process to be killed: starts a group, writes down its processes, and keeps it busy."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from services.compute.ranks.config import RankGroupConfig
from services.worker.process.rank_group import RankGroup
from tests.integration.worker_ranks.conftest import STANDIN, RankConversation, pids_of


async def main(pid_file: Path, ranks: int) -> None:
    config = RankGroupConfig(
        "well-behaved", ranks=ranks, kv_tokens=4096, max_model_len=2048, dtype="float32", rank_module=STANDIN
    )
    group = RankGroup(config)
    pids = pids_of(await group.start())
    partial = pid_file.with_suffix(".partial")
    partial.write_text(" ".join(map(str, pids)))
    partial.rename(pid_file)
    talk = RankConversation(group, [[1, 2, 3]])
    while True:
        talk.submit()
        await talk.result()
        await asyncio.sleep(0.5)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
