"""Compares what is promised to stay with the last release: contracts, REST paths, chart values and metrics.

``python -m deploy.release.compatibility [--against REF]`` prints every promise that the tree breaks and fails if there
is one. Without a tag ``v*`` there is no release to compare with; it says so.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_METRIC = re.compile(r"^\| `(\w+)` \| (\w+) \| (.*?) \|", re.MULTILINE)


def last_release(root: Path) -> str | None:
    """The newest tag ``v*`` that the tree comes from."""
    command = ["git", "-C", str(root), "describe", "--tags", "--abbrev=0", "--match", "v*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def broken(before: Path, after: Path) -> list[str]:
    """Promises of the tree `before` that `after` breaks, a line each."""
    return [*contracts(before, after), *metrics(before, after), *values(before, after), *paths(before, after)]


def contracts(before: Path, after: Path) -> list[str]:
    """Complaints of `buf breaking` about the protocol buffers' wire format, JSON names included."""
    config = json.dumps({"version": "v2", "breaking": {"use": ["WIRE_JSON"]}})
    command = [
        str(Path(sys.executable).parent / "buf"),
        "breaking",
        str(after / "proto"),
        "--config",
        config,
        "--against",
        str(before / "proto"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and not done.stdout:
        raise RuntimeError(done.stderr)
    return done.stdout.splitlines()


def metrics(before: Path, after: Path) -> list[str]:
    """Metrics that are gone, have another type, or lack a label."""
    old, new = (_metrics(tree / "docs/reference/metrics.md") for tree in (before, after))
    lines = [f"metric {name} is gone" for name in old if name not in new]
    for name in old.keys() & new.keys():
        if old[name][0] != new[name][0]:
            lines.append(f"metric {name} was a {old[name][0]} and is a {new[name][0]}")
        lines += [f"metric {name} lacks the label {label}" for label in sorted(old[name][1] - new[name][1])]
    return sorted(lines)


def _metrics(page: Path) -> dict[str, tuple[str, set[str]]]:
    return {
        name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in _METRIC.findall(page.read_text())
    }


def values(before: Path, after: Path) -> list[str]:
    """Values of the chart that are gone or whose type excludes what was allowed."""
    old, new = (
        dict(_values(json.loads((tree / "charts/ryzanstein/values.schema.json").read_text())))
        for tree in (before, after)
    )
    lines = [f"value {name} is gone" for name in old if name not in new]
    for name in old.keys() & new.keys():
        if new[name] and (gone := (old[name] or {"any"}) - new[name]):
            lines += [f"value {name} may not be {' or '.join(sorted(gone))} any more"]
    return sorted(lines)


def _values(schema: dict[str, object], name: str = "") -> Iterator[tuple[str, set[str]]]:
    """Every named value below `schema` and its types; none if any is allowed."""
    children = schema.get("properties", {})
    for key, child in children.items() if isinstance(children, dict) else ():
        path = f"{name}.{key}" if name else key
        kinds = child.get("type", [])
        yield path, {kinds} if isinstance(kinds, str) else set(kinds)
        yield from _values(child, path)


def paths(before: Path, after: Path) -> list[str]:
    """Operations of the REST API that are gone."""
    old, new = (json.loads((tree / "docs/reference/openapi.json").read_text())["paths"] for tree in (before, after))
    operations = [(path, method) for path in old for method in old[path]]
    return [f"{method.upper()} {path} is gone" for path, method in operations if method not in new.get(path, {})]


def main() -> None:
    """As the module says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", help="a tag or commit; the last release if left out")
    against = parser.parse_args().against or last_release(ROOT)
    if against is None:
        print("There is no release yet, so no promise can be broken.")
        return
    with tempfile.TemporaryDirectory() as folder:
        command = ["git", "-C", str(ROOT), "archive", against, "proto", "docs/reference", "charts/ryzanstein"]
        packed = subprocess.run(command, check=True, capture_output=True).stdout
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(folder, filter="data")
        lines = broken(Path(folder), ROOT)
    print("\n".join([*lines, f"{len(lines)} promises of {against} are broken."]))
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
