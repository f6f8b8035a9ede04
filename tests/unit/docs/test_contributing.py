"""The numbers of files that CONTRIBUTING's recipes name are the counted ones."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from services.compute.model.registry import FAMILIES
from services.router.policies.registry import PARTS

PROJECT = Path(__file__).resolve().parents[3]


# The most frequent additions, and how many files of code they take, without tests.
COUNTS = {
    "A model family": 1,
    "A routing policy": 1,
    "A format of quantized weights": 1,
    "A KV format": 1,
    "A metric": 1,
    "An endpoint": 2,
}


def test_a_recipe_has_as_many_steps_before_its_test_as_its_count_of_files() -> None:
    for what, count in COUNTS.items():
        section = (PROJECT / "CONTRIBUTING.md").read_text().split(f"\n### {what}\n")[1].split("\n#")[0]
        assert re.search(("one file" if count == 1 else "two files") + " and a test", section, re.IGNORECASE), section
        (test_step,) = re.findall(r"^(\d+)\. (?:The test|`tests/)", section, re.MULTILINE)
        assert int(test_step) == count + 1


ROOM = re.compile(r"^\| (?P<names>`services/.+?`) \|", re.MULTILINE)


def test_the_only_table_of_rooms_has_every_room() -> None:
    """Names after the first one of a row are of the same folder."""
    listed = set()
    for row in ROOM.finditer((PROJECT / "CONTRIBUTING.md").read_text()):
        first, *others = re.findall(r"`(.+?)`", row["names"])
        listed |= {first, *(f"{Path(first).parent}/{other}" for other in others)}
    services = PROJECT / "services"
    large = ("compute", "gateway", "router", "tools", "worker")
    rooms = {path.parent for service in large for path in (services / service).glob("*/__init__.py")}
    missing = {str(room.relative_to(PROJECT)) for room in rooms} - listed
    assert missing == set()
    assert "| `scheduling" not in (PROJECT / "docs" / "architecture.md").read_text(), "a second table"


def test_the_worker_has_few_rooms_and_few_imports() -> None:
    """None leads up: the contract of its layers exempts no import."""
    worker = PROJECT / "services" / "worker"
    rooms = {path.parent.name for path in worker.glob("*/__init__.py")}
    imported = re.compile(r"^ *(?:from|import) services\.worker\.(\w+)", re.MULTILINE)
    arrows = {
        (room, other)
        for room in rooms
        for file in (worker / room).rglob("*.py")
        for other in imported.findall(file.read_text())
        if other in rooms - {room}
    }
    assert len(rooms) <= 14
    assert len(arrows) <= 32, sorted(arrows)


@cache
def services() -> dict[str, str]:
    folder = PROJECT / "services"
    return {str(file.relative_to(folder)): file.read_text() for file in folder.rglob("*.py")}


def named_by(module: str) -> set[str]:
    """The files of services/ that import a module."""
    package, _, name = module.rpartition(".")
    pattern = re.compile(rf"from {re.escape(module)} import|from {re.escape(package)} import[^#]*?\b{name}\b")
    return {file for file, text in services().items() if name in text and pattern.search(text)}


def test_a_family_is_named_by_families_alone() -> None:
    """Else it would be more than one file."""
    for module in {family.read_spec.__module__ for family in FAMILIES.values()}:
        assert not {name for name in named_by(module) if "compute/model/families/" not in name}, module


def test_a_policy_part_is_named_only_by_named_policies() -> None:
    """Being in its folder makes it known, or it would be more than one file."""
    for part in PARTS.values():
        assert named_by(part.__module__) <= {"router/policies/registry.py", "router/policies/policy.py"}, part


def test_an_endpoint_is_named_where_its_route_is() -> None:
    """Of those that are whole in one file; a second one would be a third."""
    for name in ("comparison", "embeddings", "tokens"):
        assert named_by(f"services.gateway.http.{name}") == {"gateway/http/handlers.py"}
