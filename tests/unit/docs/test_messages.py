"""Messages that the troubleshooting pages quote are those of the code, word by word."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[3]
PAGE = PROJECT / "docs" / "troubleshooting.md"
ENTRY = re.compile(r"^### (?P<fence>`+)(?P<message>.+?)(?P=fence)\n(?P<body>.*?)(?=^##|\Z)", re.MULTILINE | re.DOTALL)
ENTRIES = list(ENTRY.finditer(PAGE.read_text()))
# Code spans with an ellipsis in the text of an entry are also messages.
QUOTE = re.compile(r"`(?P<message>[^`\n]*…[^`\n]*)`")
PLACEHOLDER = re.compile(r"%(?:\.\d+)?[sdfr]")


def _text_of(node: ast.AST) -> str | None:
    """A string as it stands in the source, with `…` for what is put in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return PLACEHOLDER.sub("…", node.value)
    if isinstance(node, ast.JoinedStr):
        parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
        return re.sub("…+", "…", "".join(str(part) for part in parts))
    return None


@cache
def messages() -> str:
    """All strings of the services, a line each."""
    texts = set()
    for path in (PROJECT / "services").rglob("*.py"):
        texts |= {text for node in ast.walk(ast.parse(path.read_text())) if (text := _text_of(node))}
    return "\n".join(sorted(texts))


def quoted() -> list[str]:
    heads = [entry["message"] for entry in ENTRIES]
    texts = [quote["message"] for entry in ENTRIES for quote in QUOTE.finditer(entry["body"])]
    return heads + [text for text in texts if not text.startswith("curl")]


def test_a_quoted_message_equals_the_message_in_the_code() -> None:
    expected = messages()
    for message in quoted():
        assert [part for part in message.split("…") if part.strip(" :.,")], "an ellipsis alone says nothing"
        assert message.strip("… ") in expected, f"no string of services/ reads {message!r}"


def test_every_entry_has_cause_check_and_cure() -> None:
    for entry in ENTRIES:
        parts = re.findall(r"^- \*\*(\w+)\*\*:", entry["body"], re.MULTILINE)
        assert parts == ["Cause", "Check", "Cure"], entry["message"]


def test_the_page_is_read() -> None:
    """The expressions above would find nothing if the page's form changed."""
    assert len(ENTRIES) == PAGE.read_text().count("\n### ") >= 30


def test_a_wrong_quotation_is_noticed() -> None:
    assert "port … is in usage; choose another one with --port" not in messages()
