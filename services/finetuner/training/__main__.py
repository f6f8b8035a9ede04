"""Trains one job: `python -m services.finetuner.training FOLDER BASE CHECKPOINT_S MAX_TOKENS THREADS NICE`."""

from __future__ import annotations

import sys

from services.common.lifeline import die_with_parent

if __name__ == "__main__":
    die_with_parent()  # a fine-tuner that takes the job over must not find it trained by two
    from services.finetuner.training.process import main  # torch only after that

    sys.exit(main())
