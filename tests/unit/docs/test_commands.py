"""No command of a page that operators follow escapes: a test types it, or it is listed with the reason."""

from __future__ import annotations

import re

from tests.commands import NOT_TYPED, PAGES, PLACEHOLDERS, Command, CommandPlace, commands

# Of programs: what looks as if a reader had to put it in.
WORDS = {"CONT", "EXISTS", "GET", "HF_"}
EVERY = [command for page in PAGES for command in commands(page)]


def left(command: Command) -> set[str]:
    """Placeholders that a reader replaces and no test does."""
    if not command.place:
        return set()
    filled = command.filled(dict.fromkeys(PLACEHOLDERS[command.place], "x"))
    text = re.sub(r"\s#.*|\$\{?\w+|RYZANSTEIN_\w+", "", filled)
    return set(re.findall(r"(?<![A-Za-z])[A-Z_]{2,}(?![a-z])", text)) - WORDS


def test_tests_fill_in_every_placeholder_of_a_command() -> None:
    """Else it is to be listed in NOT_TYPED."""
    assert {str(command): left(command) for command in EVERY if left(command)} == {}


def test_every_untyped_command_stands_in_a_document() -> None:
    assert set(NOT_TYPED) <= {command.name for command in EVERY}


def test_the_commands_are_found() -> None:
    """The expressions would find none if the documents' form changed."""
    assert len([each for each in EVERY if each.place is CommandPlace.CLUSTER]) > 70
    assert len([each for each in EVERY if each.place is CommandPlace.MACHINE]) > 25
