"""These tests belong to `make test-vllm`; elsewhere there is no vLLM."""

from __future__ import annotations

import os

collect_ignore_glob = [] if "RYZANSTEIN_TEST_VLLM" in os.environ else ["test_*.py"]
