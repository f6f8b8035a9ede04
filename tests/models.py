"""The models that tests find in the repository."""

from __future__ import annotations

from pathlib import Path

BUNDLED_MODEL = Path(__file__).resolve().parents[1] / "models" / "ryzanstein-tiny"
