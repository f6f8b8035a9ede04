"""The training process: reads a job's folder, trains, and says what it does."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import torch
from transformers import AutoTokenizer

from services.common.cores import usable_cores
from services.common.fine_tuning.records import Order
from services.compute.backends.opening import settle_vector_math
from services.finetuner.training.base import base_folder
from services.finetuner.training.checkpoints import Checkpoints
from services.finetuner.training.examples import TokenizedExample, Tokenizer
from services.finetuner.training.messages import REFUSED, STOPPED, RefusedError, Voice
from services.finetuner.training.model import load_model
from services.finetuner.training.run import Training, TrainingLimits


def main() -> int:
    """Run the command line that the module `__main__` describes; returns the exit status."""
    folder, source, checkpoint_s, max_tokens, threads, nice, *messages = sys.argv[1:]
    voice, stop = Voice(Path(messages[0]) if messages else None), threading.Event()
    os.nice(int(nice))
    torch.set_num_threads(int(threads) or usable_cores())
    settle_vector_math()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        training = _open(Path(folder), source, TrainingLimits(device, float(checkpoint_s), int(max_tokens)), voice)
    except RefusedError as error:
        voice.say("refused", code=error.code, message=str(error), param=error.param)
        return REFUSED
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    return 0 if training.run(stop) else STOPPED


def _open(folder: Path, source: str, limits: TrainingLimits, voice: Voice) -> Training:
    order = Order.model_validate_json((folder / "job.json").read_text())
    base = base_folder(source, folder.parent.parent / "bases", order.id)
    tokenizer = Tokenizer(AutoTokenizer.from_pretrained(base, local_files_only=True), limits.max_tokens)
    train, valid = tokenizer.read(folder / "training.jsonl"), list[TokenizedExample]()
    if order.validation_file:
        valid = tokenizer.read(folder / "validation.jsonl")
    last = Checkpoints(folder).last()
    resumed = last.folder if last else None
    return Training(order, folder, load_model(base, order, limits.device, resumed), train, valid, limits, voice)
