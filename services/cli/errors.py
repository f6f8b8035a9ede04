"""What a command says when it cannot do its work."""

from __future__ import annotations


class CommandError(Exception):
    """One clear line for the user; the command exits with status 1."""
