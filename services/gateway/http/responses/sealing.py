"""Text in an opaque form, which clients send back: reasoning and summaries. It is encoded, and not secret."""

from __future__ import annotations

import base64
import binascii

_MARK = "rz1."


def seal(text: str) -> str:
    """The opaque form of a text."""
    return _MARK + base64.urlsafe_b64encode(text.encode()).decode()


def unseal(sealed: object) -> str | None:
    """The text; None for the opaque form of another server, and for what is none."""
    if not isinstance(sealed, str) or not sealed.startswith(_MARK):
        return None
    try:
        return base64.b64decode(sealed.removeprefix(_MARK), altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None
