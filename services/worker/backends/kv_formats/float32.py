"""Keys and values in float32."""

from __future__ import annotations

import torch

from services.worker.backends.kv_format import PlainNumbers

FORMAT = PlainNumbers("float32", torch.float32)
