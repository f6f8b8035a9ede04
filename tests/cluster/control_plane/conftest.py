"""Tests that need an API server and its controllers, but no node: no pod of theirs ever runs."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("control_plane")
            item.add_marker("smoke")
