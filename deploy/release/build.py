"""Makes a release: ``make release VERSION=1.2.3``.

Sets the version wherever it stands, moves the changelog's section, writes the generated files anew, and puts the
artefacts into ``dist/release/VERSION``: wheels of the servers and of the client, the chart's package, the images and a
list of what each holds, one archive for places without a network, checksums and the provenance. It commits, signs and
publishes nothing: the release workflow does so from the tag.
"""

from __future__ import annotations

import argparse
import datetime
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from deploy.docker.build import IMAGES, REPOSITORY
from deploy.release import changelog, provenance, sbom, versions

ROOT = Path(__file__).resolve().parents[2]


def prepare(root: Path, version: str, day: str) -> None:
    """Set `version` in the tree at `root` and write the generated files; raises ValueError with what is wrong."""
    versions.check(version)
    path = root / "CHANGELOG.md"
    text = changelog.released(path.read_text(), version, day)
    versions.set_version(root, version)
    path.write_text(text)
    for module in ("charts.tools.build", "docs.reference.build"):
        _run(sys.executable, "-m", module, at=root)


def build(out: Path, version: str, images: list[str], arch: str) -> None:
    """Make the artefacts of the tree as it stands."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for project in (ROOT, ROOT / "clients" / "python"):
        _run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(out), str(project))
    _run(_helm(), "package", "charts/ryzanstein", "--destination", str(out))
    if images:
        archives = out / "images"
        options = ["--arch", arch, "--tag", version, "--archives", str(archives)]
        _run(sys.executable, "-m", "deploy.docker.build", *options, *images)
        for archive in sorted(archives.glob("*.tar")):
            name = f"{REPOSITORY}:{archive.stem}-{version}"
            (out / f"{archive.stem}-{arch}.cdx.json").write_text(sbom.of_archive(archive, name, version))
        _bundle(out, version, arch)
        shutil.rmtree(archives)
    (out / "notes.md").write_text(changelog.section((ROOT / "CHANGELOG.md").read_text(), version) or "")
    provenance.write(out, ROOT, version)


def _bundle(out: Path, version: str, arch: str) -> None:
    """One archive with what an installation without a network needs: images, the chart, the page that says how."""
    name = f"ryzanstein-{version}-{arch}-airgapped"
    with tarfile.open(out / f"{name}.tar", "w") as archive:
        for path in [*sorted((out / "images").glob("*.tar")), *sorted(out.glob("*.tgz"))]:
            archive.add(path, f"{name}/{path.relative_to(out)}")
        archive.add(ROOT / "docs" / "air-gapped.md", f"{name}/README.md")
        archive.add(ROOT / "deploy" / "images" / "mirror.sh", f"{name}/mirror.sh")


def _helm() -> str:
    for name in ("helm", str(ROOT / "build/bin/helm4"), str(ROOT / "build/bin/helm3")):
        if program := shutil.which(name):
            return program
    sys.exit("helm is needed to package the chart, and is not in PATH")


def _run(*command: str, at: Path = ROOT) -> None:
    done = subprocess.run(command, cwd=at, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout[-4000:]}{done.stderr[-4000:]}\n{' '.join(command)} ended with {done.returncode}")


def main() -> None:
    """As the module says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version")
    parser.add_argument("--arch", default="amd64", choices=("amd64", "arm64"))
    parser.add_argument("--images", default=",".join(IMAGES), help="names with commas between them; empty for none")
    options = parser.parse_args()
    try:
        prepare(ROOT, options.version, datetime.datetime.now(tz=datetime.UTC).date().isoformat())
    except ValueError as error:
        sys.exit(str(error))
    out = ROOT / "dist" / "release" / options.version
    build(out, options.version, [name for name in options.images.split(",") if name], options.arch)
    for path in sorted(out.iterdir()):
        print(f"{path.stat().st_size / 1e6:9.1f} MB  {path.relative_to(ROOT)}")
    print("Nothing is signed or published: the release workflow does both from the tag.")


if __name__ == "__main__":
    main()
