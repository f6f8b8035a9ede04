"""The places in the tree where a version stands, and how it is set in all of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

VERSION = re.compile(r"(\d+\.\d+\.\d+)(?:-([0-9A-Za-z]+(?:[.-][0-9A-Za-z]+)*))?")
_STANDS = r"([0-9][0-9A-Za-z.+-]*)"


@dataclass(frozen=True, slots=True)
class Place:
    """A pattern whose only group is the version, and how often it is found in the file."""

    file: str
    pattern: str
    times: int = 1
    python: bool = False  # as Python writes versions (PEP 440)


PLACES = (
    Place("pyproject.toml", rf'^version = "{_STANDS}"', python=True),
    Place("clients/python/pyproject.toml", rf'^version = "{_STANDS}"', python=True),
    Place("charts/ryzanstein/Chart.yaml", rf"^(?:version|appVersion): {_STANDS}", times=2),
    Place("charts/ryzanstein/ci/subchart/Chart.yaml", rf"(?:^|name: ryzanstein, )version: {_STANDS}", times=3),
    Place("deploy/compose.yaml", rf"RYZANSTEIN_VERSION:-{_STANDS}\}}", times=4),
    Place("deploy/argocd/application.yaml", rf"targetRevision: v{_STANDS}"),
    Place("deploy/flux/release.yaml", rf"ref: {{tag: v{_STANDS}}}"),
    Place("docs/air-gapped.md", rf"ryzanstein-{_STANDS}\.tgz"),
    Place("docs/engines.md", rf'ryzanstein:worker-vllm-cpu-{_STANDS}"'),
    Place("docs/simulate.md", rf"ryzanstein:simulator-{_STANDS}(?=[\s\"])", times=3),
    Place("tests/commands.py", rf'ryzanstein:simulator-{_STANDS}"'),
    Place("docs/images.md", rf"ryzanstein:gateway-{_STANDS}`"),
)


def check(version: str) -> None:
    """Raise ValueError unless `version` is a semantic version without build metadata, such as 1.2.3 or 1.2.3-rc.1."""
    if not VERSION.fullmatch(version):
        raise ValueError(f"VERSION {version!r} is no semantic version: 1.2.3 or 1.2.3-rc.1, without a leading v")


def python_version(version: str) -> str:
    """The version as PEP 440 writes it: 1.2.3-rc.1 is 1.2.3rc1, and 1.2.3-test is 1.2.3.dev0+test."""
    release, label = VERSION.fullmatch(version).groups()  # type: ignore[union-attr]  # checked
    if not label:
        return str(release)
    if known := re.fullmatch(r"(a|alpha|b|beta|rc|dev)[.-]?(\d+)", label):
        kind = {"alpha": "a", "beta": "b", "dev": ".dev"}.get(known[1], known[1])
        return f"{release}{kind}{known[2]}"
    return f"{release}.dev0+{label.replace('-', '.').lower()}"


def set_version(root: Path, version: str) -> None:
    """Write `version` to every place; raises ValueError if a place is not as often there as it should be."""
    check(version)
    written = {}
    for place in PLACES:
        path = root / place.file
        text = written.get(path) or path.read_text()
        value = python_version(version) if place.python else version
        text, times = re.subn(place.pattern, lambda match, v=value: _with(match, v), text, flags=re.MULTILINE)
        if times != place.times:
            raise ValueError(f"{place.file}: {place.pattern} is found {times} times, not {place.times}")
        written[path] = text
    for path, text in written.items():
        path.write_text(text)


def _with(match: re.Match[str], version: str) -> str:
    start, end = match.span(1)
    return match.string[match.start() : start] + version + match.string[end : match.end()]
