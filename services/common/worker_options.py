"""Values that a worker shares with `ryzanstein up` and with gateways."""

from __future__ import annotations

from typing import Literal

EngineName = Literal["native", "vllm", "simulated"]
Dtype = Literal["auto", "float32", "bfloat16"]
KvDtype = Literal["auto", "bf16", "int8", "fp8"]
Speculation = Literal["auto", "off"]
Quantization = Literal["auto", "int8", "int4", "none"]
MAX_WEIGHT = 1000  # share of a tenant
