"""Keys and values in bfloat16."""

from __future__ import annotations

import torch

from services.worker.backends.kv_format import PlainNumbers

FORMAT = PlainNumbers("bfloat16", torch.bfloat16)
