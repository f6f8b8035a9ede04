"""Keys and values in float16."""

from __future__ import annotations

import torch

from services.worker.backends.kv_format import PlainNumbers

FORMAT = PlainNumbers("float16", torch.float16)
