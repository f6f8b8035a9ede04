"""The error of commands."""

from __future__ import annotations


class CommandError(Exception):
    """A command failed; its message is one line for the user."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status  # that the program ends with
