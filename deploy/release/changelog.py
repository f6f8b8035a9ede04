"""The changelog of a release: what stands under "Unreleased" becomes the section of the version."""

from __future__ import annotations

import re

UNRELEASED = "## Unreleased"


def section(text: str, version: str) -> str | None:
    """What the changelog says of `version`, or None."""
    found = re.search(
        rf"^## {re.escape(version)} - \d{{4}}-\d\d-\d\d\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL
    )
    return found[1].strip() if found else None


def released(text: str, version: str, day: str) -> str:
    """The changelog with the section of `version`; unchanged where it has one.

    Raises ValueError if nothing stands under "Unreleased".
    """
    if section(text, version) is not None:
        return text
    found = re.search(rf"^{UNRELEASED}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if not found or not re.search(r"^- ", found[1], re.MULTILINE):
        raise ValueError(f'CHANGELOG.md has neither a section of {version} nor a line under "{UNRELEASED}"')
    return f"{text[: found.start()]}{UNRELEASED}\n\n## {version} - {day}\n{found[1]}{text[found.end() :]}"
