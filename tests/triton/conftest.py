"""These tests belong to `make test-triton`, where Triton's interpreter computes on the CPU what a GPU would."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
