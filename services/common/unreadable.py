"""Values in Redis that this version cannot read, such as those of a later one: they are left out, and logged once."""

from __future__ import annotations

import logging


class Unreadable:
    """The values that were logged."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._logged: dict[tuple[str, str], bytes | str] = {}  # by key and field

    def note(self, key: str, field: str, text: bytes | str, error: Exception) -> None:
        """Log the value of a hash's field, unless it was logged before."""
        if self._logged.get((key, field)) != text:
            self._logged[key, field] = text
            self._log.error("%r of %s cannot be read and is left out: %s", field, key, error)
