"""Removes what jobs that are over have left on disk."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from pathlib import Path

from pydantic import ValidationError

from services.common.fine_tuning.records import OVER, Order
from services.common.fine_tuning.store import TuningStore

log = logging.getLogger(__name__)

_PAUSE_S = 600.0
_OF_TRAINING = ("training.jsonl", "validation.jsonl", "checkpoints/*/training.pt")  # useless once a job is over


async def keep_tidy(jobs: Path, store: TuningStore, keep_s: float) -> None:
    """Sweep the folder of all jobs every ten minutes, until cancelled."""
    while True:
        await sweep(jobs, store, keep_s)
        await asyncio.sleep(_PAUSE_S)


async def sweep(jobs: Path, store: TuningStore, keep_s: float) -> None:
    """Remove the training data of jobs that are over, and after `keep_s` their folders, unless an adapter is served."""
    for file in await asyncio.to_thread(lambda: sorted(jobs.glob("*/job.json"))):
        try:
            order = Order.model_validate_json(await asyncio.to_thread(file.read_text))
            job = await store.get(order.tenant, order.id)
            if job is None or job.status in OVER:
                served = await store.served_folders()
                await asyncio.to_thread(_remove, file.parent, served, time.time() - keep_s)
        except (OSError, ValidationError) as error:  # another fine-tuner also sweeps; or the file is not a job's
            log.warning("%s is not swept: %s", file.parent, error)


def _remove(folder: Path, served: frozenset[str], before: float) -> None:
    for pattern in _OF_TRAINING:
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)
    ended = max(path.stat().st_mtime for path in folder.iterdir())
    if ended < before and not any(Path(source).is_relative_to(folder) for source in served):
        log.info("%s is removed", folder)
        shutil.rmtree(folder)
