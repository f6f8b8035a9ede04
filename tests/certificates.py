"""Folders with certificates, as the chart mounts them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from services.common.tls.certificate import AUTHORITIES, CERTIFICATE, KEY, Identity
from services.common.tls.issuing import Authority

DOMAIN = "rz.llm"
DAY = timedelta(days=1)


def write(
    folder: Path,
    component: str,
    by: Authority,
    trusted: Sequence[Authority] = (),
    *,
    life: timedelta = DAY,
    domain: str = DOMAIN,
) -> Path:
    """Write a certificate of `component`, which trusts `trusted`, by default its own CA."""
    issued = by.issue(Identity(domain, component), life)
    folder.mkdir(parents=True, exist_ok=True)
    bundle = b"".join(each.own.certificate for each in trusted or [by])
    for name, content in ((AUTHORITIES, bundle), (KEY, issued.key), (CERTIFICATE, issued.certificate)):
        (folder / f".{name}").write_bytes(content)
        (folder / f".{name}").rename(folder / name)
    return folder
