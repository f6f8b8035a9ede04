"""How to install an extra of the package: no index has it, so from the clone that this code runs from, if it does."""

from __future__ import annotations

from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]


def pip_install(extras: str, pip: str = "pip") -> str:
    """The command that installs extras with a pip: the clone's, or those of the index or folder that pip is set to."""
    package = f"-e '{_ROOT}" if (_ROOT / "pyproject.toml").is_file() else "'ryzanstein"
    return f"{pip} install {package}[{extras}]'"
