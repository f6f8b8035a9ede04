"""The methods by the names that users give."""

from __future__ import annotations

from collections.abc import Mapping

from services.tools.quantizer.methods.awq import Awq
from services.tools.quantizer.methods.base import Method
from services.tools.quantizer.methods.gptq import Gptq
from services.tools.quantizer.methods.rtn import RoundToNearest

METHODS: Mapping[str, Method] = {"gptq": Gptq(), "awq": Awq(), "rtn": RoundToNearest()}
