"""The certificate of a process: what its files may become while it runs."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from services.common.tls import credentials
from services.common.tls.certificate import CERTIFICATE, Identity
from services.common.tls.credentials import Tls
from services.common.tls.issuing import Authority
from tests.certificates import DAY, write


def test_the_last_usable_certificate_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(credentials, "_LOOK_EVERY_S", 0.0)
    authority = Authority.new(DAY)
    tls = Tls(write(tmp_path, "router", authority))
    first = tls.current()
    (tmp_path / CERTIFICATE).write_text("half a file")
    assert tls.current() is first
    write(tmp_path, "gateway", authority)
    assert tls.current() is first
    write(tmp_path, "router", authority)
    assert tls.current() is not first
    assert tls.identity == first.identity
    message = [record.getMessage() for record in caplog.records]
    assert len(message) == 3, "once each"
    assert message[0].startswith("the certificate is not renewed, the last one is kept: ")
    assert message[1].endswith("it is of spiffe://rz.llm/gateway, this process is spiffe://rz.llm/router")
    assert message[2] == "certificate renewed"


@pytest.mark.parametrize("uri", ["https://rz.llm/router", "spiffe://rz.llm", "spiffe:///router", "spiffe://rz.llm/a/b"])
def test_another_form_is_no_identity(uri: str) -> None:
    with pytest.raises(ValueError, match="is not spiffe://"):
        Identity.from_uri(uri)
    assert Identity.from_uri("spiffe://rz.llm/router") == Identity("rz.llm", "router")
