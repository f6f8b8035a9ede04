"""A release sets every version, lists what its images hold, and says which promises it breaks."""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
import subprocess
import tarfile
import tomllib
from pathlib import Path

import pytest

from deploy.docker.build import IMAGES
from deploy.release import changelog, compatibility, provenance, sbom, versions

ROOT = Path(__file__).resolve().parents[3]
CURRENT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
# Files with older versions, pins of others, the output of `make release`, and tests.
LEFT = re.compile(
    r"CHANGELOG\.md|.*/UPGRADING\.md|constraints\.txt|.*/images\.txt|tests/.*|docs/reference/.*|.*\.(js|css|svg|png)"
)


def test_workflow_publishes_every_image() -> None:
    workflow = (ROOT / ".github" / "workflows" / "release.yaml").read_text()
    assert f"for target in {' '.join(IMAGES)}; do" in workflow


@pytest.mark.needs("git")
def test_a_release_sets_every_version_that_stands_in_the_tree(tmp_path: Path) -> None:
    command = ["git", "-C", str(ROOT), "grep", "-lwF", CURRENT]
    files = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    places = {place.file for place in versions.PLACES}
    for file in {name for name in files if not LEFT.fullmatch(name)} | places:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    versions.set_version(tmp_path, "9.8.7-rc.1")
    texts = {path: path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    # 0.1.0 also stands in versions of others, which are longer.
    assert [path for path, text in texts.items() if re.search(rf"(?<![\d.]){re.escape(CURRENT)}(?![\d.])", text)] == []
    assert sum("9.8.7rc1" in text or "9.8.7-rc.1" in text for text in texts.values()) == len(texts)


@pytest.mark.parametrize("version", ["1.2", "v1.2.3", "1.2.3+build", "1.2.3-", "1.2.3 "])
def test_an_invalid_semantic_version_is_rejected(version: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no semantic version"):
        versions.set_version(tmp_path, version)


def test_python_has_its_own_way_to_write_versions() -> None:
    pairs = {"1.2.3": "1.2.3", "1.2.3-rc.1": "1.2.3rc1", "1.2.3-alpha.2": "1.2.3a2", "0.0.0-test": "0.0.0.dev0+test"}
    assert {version: versions.python_version(version) for version in pairs} == pairs


def test_the_changelog_gets_a_section_once_and_never_an_empty_section() -> None:
    text = "# Changelog\n\n## Unreleased\n\n### Added\n\n- a thing\n\n## 0.9.0 - 2026-01-01\n\n- old\n"
    once = changelog.released(text, "1.0.0", "2026-02-03")
    assert changelog.section(once, "1.0.0") == "### Added\n\n- a thing"
    assert changelog.section(once, "0.9.0") == "- old"
    assert changelog.released(once, "1.0.0", "2027-01-01") == once
    with pytest.raises(ValueError, match=r"neither a section of 1\.1\.0 nor a line"):
        changelog.released(once, "1.1.0", "2027-01-01")
    assert changelog.released((ROOT / "CHANGELOG.md").read_text(), "99.0.0", "2027-01-01")


def _tar(files: dict[str, str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
    return buffer.getvalue()


def test_an_image_is_listed_after_all_layers(tmp_path: Path) -> None:
    site = "opt/venv/lib/python3.11/site-packages"
    bottom = {
        "var/lib/dpkg/status": "Package: libc6\nStatus: install ok installed\nVersion: 2.41-1\n\n"
        "Package: gone\nStatus: deinstall ok config-files\nVersion: 1\n",
        f"{site}/pip-25.0.dist-info/METADATA": "Name: pip\nVersion: 25.0\n\ntext",
        f"{site}/numpy-1.0.dist-info/METADATA": "Name: numpy\nVersion: 1.0\n",
    }
    top = {
        f"{site}/Torch_Thing-2.13.0.dist-info/METADATA": "Name: Torch_Thing\nVersion: 2.13.0+cpu\n",
        f"{site}/.wh.pip-25.0.dist-info": "",
        f"{site}/numpy-1.0.dist-info/METADATA": "Name: numpy\nVersion: 2.0\n",
    }
    archive = tmp_path / "image.tar"
    with tarfile.open(archive, "w") as outer:
        for name, content in (
            ("manifest.json", json.dumps([{"Layers": ["a.tar", "b.tar"]}]).encode()),
            ("a.tar", _tar(bottom)),
            ("b.tar", _tar(top)),
        ):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            outer.addfile(entry, io.BytesIO(content))
    listed = json.loads(sbom.of_archive(archive, "worker-cpu", "1.2.3"))
    assert sorted(part["purl"] for part in listed["components"]) == [
        "pkg:deb/debian/libc6@2.41-1",
        "pkg:pypi/numpy@2.0",
        "pkg:pypi/torch-thing@2.13.0%2Bcpu",
    ]
    assert listed["metadata"]["component"]["version"] == "1.2.3"


@pytest.mark.needs("git")
def test_the_provenance_names_each_file_by_its_digest(tmp_path: Path) -> None:
    (tmp_path / "a.whl").write_bytes(b"wheel")
    provenance.write(tmp_path, ROOT, "1.2.3")
    digest = hashlib.sha256(b"wheel").hexdigest()
    assert (tmp_path / "SHA256SUMS").read_text() == f"{digest}  a.whl\n"
    statement = json.loads((tmp_path / "provenance.json").read_text())
    assert statement["subject"] == [{"name": "a.whl", "digest": {"sha256": digest}}]
    revision = statement["predicate"]["buildDefinition"]["resolvedDependencies"][0]["digest"]["gitCommit"]
    assert re.fullmatch(r"[0-9a-f]{40}", revision)


BREAKS = {
    "proto/ryzanstein/v1/worker.proto": (r"string (\w+) = 1;", r"bytes \1 = 1;", "changed type"),
    "docs/reference/metrics.md": (
        r"\| `ryzanstein_gateway_tokens_total` .*\n",
        "",
        "metric ryzanstein_gateway_tokens_total is gone",
    ),
    "charts/ryzanstein/values.schema.json": (r'"fullnameOverride"', '"otherName"', "value fullnameOverride is gone"),
    "docs/reference/openapi.json": (r'"/v1/models":', '"/v2/models":', "GET /v1/models is gone"),
}


@pytest.mark.parametrize("file", BREAKS)
def test_a_broken_promise_is_named(file: str, tmp_path: Path) -> None:
    for folder in ("proto", "docs/reference", "charts/ryzanstein"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    assert compatibility.broken(ROOT, tmp_path) == []
    pattern, replacement, message = BREAKS[file]
    path = tmp_path / file
    text, n = re.subn(pattern, replacement, path.read_text(), count=1)
    assert n == 1
    path.write_text(text)
    assert [line for line in compatibility.broken(ROOT, tmp_path) if message in line]
