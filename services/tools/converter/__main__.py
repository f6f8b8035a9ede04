"""Converts a checkpoint: `python -m services.tools.converter REQUEST`, which `ryzanstein convert` starts."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

from services.compute.model.loading.hub import resolve_model
from services.tools.converter.run import ConversionOptions, convert
from services.tools.program import Progress, run


def convert_model(request: dict[str, Any], progress: Progress) -> None:
    """Convert by the fields of :class:`ConversionOptions`; counts tensors. Raises ModelError."""
    source, out = resolve_model(request.pop("source")), Path(request.pop("out")).absolute()
    convert(ConversionOptions(source, out, **request), partial(progress, "convert"))


if __name__ == "__main__":
    sys.exit(run(convert_model))
