"""Trains one job: `python -m services.finetuner.training FOLDER BASE CHECKPOINT_S MAX_TOKENS THREADS NICE [MESSAGES]`.

SIGTERM ends it, after a checkpoint if it has begun to train. MESSAGES is a file for its messages, by default stdout.
"""

import os
import signal
import sys

from services.common.lifeline import PARENT_VARIABLE, die_with_parent
from services.finetuner.training.messages import STOPPED

# Before imports that take seconds: the first process of a container ignores a signal that it has no handler for.
signal.signal(signal.SIGTERM, lambda *_: sys.exit(STOPPED))

if __name__ == "__main__":
    if PARENT_VARIABLE in os.environ:
        die_with_parent()  # a fine-tuner that takes the job over must not find it trained by two
    from services.finetuner.training.process import main

    sys.exit(main())
