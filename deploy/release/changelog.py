"""The changelog of a release: what stands under "Unreleased" becomes the section of the version."""

from __future__ import annotations

import re

UNRELEASED = "## Unreleased"


def section(text: str, version: str) -> str | None:
    """The changelog's section of `version`, or None."""
    match = re.search(
        rf"^## {re.escape(version)} - \d{{4}}-\d\d-\d\d\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL
    )
    return match[1].strip() if match else None


def released(text: str, version: str, day: str) -> str:
    """The changelog with the section of `version`; unchanged where it has one.

    Raises ValueError if nothing stands under "Unreleased".
    """
    if section(text, version) is not None:
        return text
    match = re.search(rf"^{UNRELEASED}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if not match or not re.search(r"^- ", match[1], re.MULTILINE):
        raise ValueError(f'CHANGELOG.md has neither a section of {version} nor a line under "{UNRELEASED}"')
    return f"{text[: match.start()]}{UNRELEASED}\n\n## {version} - {day}\n{match[1]}{text[match.end() :]}"
