"""The error of commands."""

from __future__ import annotations


class CommandError(Exception):
    """A command failed; its message is one line for the user, and the exit status is 1."""
