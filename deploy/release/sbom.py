"""Lists what an image holds, as CycloneDX: Debian's packages and Python's distributions, read from the image itself."""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Iterator
from email.parser import HeaderParser
from pathlib import Path

from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

_DISTRIBUTION = re.compile(r".*\.dist-info/METADATA")
_DEBIAN = re.compile(r"var/lib/dpkg/status(\.d/[^/]+)?")


def of_archive(archive: Path, name: str, version: str) -> str:
    """The SBOM of a docker archive as JSON. A file of a later layer replaces the same one of an earlier layer."""
    bom = Bom()
    bom.metadata.component = Component(name=name, version=version, type=ComponentType.CONTAINER)
    for component in _components(_files(archive)):
        bom.components.add(component)
        bom.register_dependency(bom.metadata.component, [component])
    return JsonV1Dot6(bom).output_as_string(indent=1)


def _files(archive: Path) -> dict[str, str]:
    """The texts of the layers that name packages, by path."""
    contents: dict[str, str] = {}
    with tarfile.open(archive) as outer:
        manifest = json.load(_member(outer, "manifest.json"))
        for layer in manifest[0]["Layers"]:
            with tarfile.open(fileobj=_member(outer, layer)) as inner:
                for item in inner:
                    path = item.name.removeprefix("./")
                    folder, _, leaf = path.rpartition("/")
                    if leaf.startswith(".wh."):
                        _remove(contents, f"{folder}/{leaf.removeprefix('.wh.')}")
                    elif item.isfile() and (_DISTRIBUTION.fullmatch(path) or _DEBIAN.fullmatch(path)):
                        contents[path] = _member(inner, item).read().decode(errors="replace")
    return contents


def _member(archive: tarfile.TarFile, item: str | tarfile.TarInfo) -> tarfile.ExFileObject:
    file = archive.extractfile(item)
    if file is None:
        raise ValueError(f"{archive.name}: {item} is no file")
    return file  # type: ignore[return-value]  # extractfile returns a file object for files


def _remove(contents: dict[str, str], path: str) -> None:
    for name in [name for name in contents if name == path or name.startswith(f"{path}/")]:
        del contents[name]


def _components(files: dict[str, str]) -> Iterator[Component]:
    for path, text in files.items():
        if _DISTRIBUTION.fullmatch(path):
            headers = HeaderParser().parsestr(text)
            yield _component("pypi", None, headers["Name"], headers["Version"])
        else:
            for paragraph in text.split("\n\n"):
                headers = HeaderParser().parsestr(paragraph)
                if headers["Package"] and headers.get("Status", "installed").endswith("installed"):
                    yield _component("deb", "debian", headers["Package"], headers["Version"])


def _component(kind: str, namespace: str | None, name: str, version: str) -> Component:
    # Names of Python's distributions are compared without case, and as if _ and . were -.
    plain = re.sub(r"[-_.]+", "-", name).lower() if kind == "pypi" else name
    purl = PackageURL(kind, namespace, plain, version)
    return Component(name=name, version=version, purl=purl, bom_ref=str(purl), type=ComponentType.LIBRARY)
