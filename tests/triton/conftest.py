"""These tests run on a GPU, or in `make test-triton` by Triton's interpreter, which computes the same on a CPU."""

from __future__ import annotations

import os

import torch

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.is_available() else ["test_*.py"]
