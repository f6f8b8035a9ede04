"""Trainings in processes of the fine-tuner."""

from __future__ import annotations

import psutil

from tests.integration.finetuner.site import ORDER, Site


def trainings() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "services.finetuner.training" in child.cmdline()]


async def test_a_training_ends_when_its_job_is_paused_and_when_its_fine_tuner_ends(site: Site) -> None:
    """Even one that has not begun to train; its job is no worse for that."""
    await site.queue()
    async with site.fine_tuner(finetuner_job_template="", finetuner_attempts=1, lease_s=30.0):
        await site.until(trainings)
        await site.store.turn("", ORDER.id, "paused", ["running"])
        await site.until_given_back()
        assert not trainings()
        assert (await site.job()).status == "paused"
        await site.store.turn("", ORDER.id, "queued", ["paused"])
        await site.until(trainings)
    assert not trainings()
    job = await site.job()
    assert (job.status, job.error) == ("running", None)
    await site.until_given_back()
