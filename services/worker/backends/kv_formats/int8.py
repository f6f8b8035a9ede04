"""Keys and values in int8 with a bfloat16 scale for each token and head: 8.25 bits per number with heads of 64."""

from __future__ import annotations

import torch

from services.worker.backends.scaled_codes import ScaledCodes

FORMAT = ScaledCodes("int8", torch.int8, 127.0)
