"""The list of hosts from which images are fetched, as settings have it; free of libraries for images."""

from __future__ import annotations

import re

_HOST = re.compile(r"(\*\.)?[a-z0-9]([a-z0-9.-]*[a-z0-9])?(:[0-9]{1,5})?")


def image_host(text: str) -> str:
    """An entry of the list of hosts, in lower case; raises ValueError."""
    host = text.lower()
    if _HOST.fullmatch(host) is None:
        raise ValueError(f"{text!r} is none of host, host:port, *.domain")
    return host
