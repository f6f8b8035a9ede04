"""Runs a rank: opens the link before torch is imported, and reports every error to the server."""

from __future__ import annotations

import importlib
import logging
import os
import time
import traceback

from services.common.heap import uncollected
from services.common.lifeline import die_with_parent
from services.common.logs import configure_logging
from services.worker.protocol.event_codec import RankError, encode_event
from services.worker.protocol.rank_config import SETTINGS_VARIABLE, RankSettings
from services.worker.rank.link import ServerGoneError, ServerLink

logger = logging.getLogger(__name__)


def run_rank(loader: str) -> int:
    """Run until the stop message; return the exit status. `loader` is `module:function`, imported after torch."""
    entered = time.time()
    die_with_parent()
    settings = RankSettings.from_json(os.environ[SETTINGS_VARIABLE])
    rank = int(os.environ["RANK"])
    configure_logging("worker", settings.config.log_level, rank=rank)  # the server copies the lines to its log
    link = ServerLink(settings, rank)
    try:
        _serve(link, settings, rank, loader, entered - settings.endpoint.launched_at)
    except ServerGoneError as gone:
        logger.error("leaving: %s", gone)
        return 1
    except BaseException as error:  # the server reports this as the reason of the rank's end
        logger.exception("the rank has failed")  # the server decides about a restart
        _report(link, rank, error)
        return 1
    return 0


def _serve(link: ServerLink, settings: RankSettings, rank: int, loader: str, launch_s: float) -> None:
    began = time.perf_counter()
    module, _, function = loader.partition(":")
    with uncollected():
        process = importlib.import_module("services.worker.rank.process")  # imports torch
        load = getattr(importlib.import_module(module), function)
    phases = process.Phases({"launch": launch_s, "import": time.perf_counter() - began})
    process.serve(link, settings.config, rank, phases, load)


def _report(link: ServerLink, rank: int, error: BaseException) -> None:
    text = "".join(traceback.format_exception(error))
    suspects = tuple(getattr(error, "missing", ()))
    link.send(encode_event(RankError(rank, os.getpid(), f"{type(error).__name__}: {error}", text, suspects)))
