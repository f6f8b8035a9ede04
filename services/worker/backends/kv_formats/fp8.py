"""Keys and values in 8-bit floats (e4m3) with a bfloat16 scale for each token and head, for GPUs."""

from __future__ import annotations

import torch

from services.worker.backends.scaled_codes import ScaledCodes

FORMAT = ScaledCodes("fp8", torch.float8_e4m3fn, 448.0)
