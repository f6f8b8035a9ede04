"""TLS at the gateway itself: REST, WebSocket and gRPC, and a certificate that is renewed without a restart."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from datetime import timedelta
from pathlib import Path

import grpc
import grpc.aio
import httpx
import pytest
import websockets
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.lifecycle import StartupError, read_settings
from services.common.ports import free_port
from services.common.tls.certificate import Identity
from services.common.tls.issuing import Authority
from services.gateway.settings import GatewaySettings
from tests.integration.gateway.fleet import Worker
from tests.integration.gateway.gateways import eventually, running_stack

HOST = "localhost"


def write(folder: Path, authority: Authority) -> dict[str, str]:
    """Write a certificate of this host and its key; the settings that name them."""
    issued = authority.issue(Identity("rz.llm", "public"), timedelta(days=1), hosts=[HOST])
    files = {"gateway_tls_certificate": folder / "tls.crt", "gateway_tls_key": folder / "tls.key"}
    for path, content in zip(files.values(), (issued.certificate, issued.key), strict=True):
        path.write_bytes(content)
    return {name: str(path) for name, path in files.items()}


def shown(port: int) -> bytes:
    """The certificate that a new connection is shown, DER."""
    return ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate(("127.0.0.1", port)))


async def test_clients_speak_tls_and_a_new_certificate_needs_no_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority.new(timedelta(days=2))
    files = write(tmp_path, authority)
    trust = ssl.create_default_context(cadata=authority.own.certificate.decode())
    grpc_port = free_port()
    async with running_stack([Worker("w0")], grpc_port=grpc_port, **files) as stack:
        port = stack.gateway.http.port
        url = f"https://{HOST}:{port}"
        async with httpx.AsyncClient(base_url=url, verify=trust, trust_env=False, timeout=60) as http:
            body = {"prompt": "a", "max_tokens": 4}
            assert (await http.post("/v1/completions", json=body)).status_code == 200
            streamed = await http.post("/v1/completions", json=body | {"stream": True})
            assert streamed.text.endswith("data: [DONE]\n\n")
        async with websockets.connect(f"wss://{HOST}:{port}/v1/stream", ssl=trust) as socket:
            request = {"model": "test-model", "prompt": "a", "max_tokens": 4}
            await socket.send(json.dumps({"type": "start", "id": "a", "kind": "completion", "request": request}))
            while (kind := json.loads(await socket.recv())["type"]) not in ("done", "error"):
                pass
            assert kind == "done"
        credentials = grpc.ssl_channel_credentials(authority.own.certificate)
        async with grpc.aio.secure_channel(f"{HOST}:{grpc_port}", credentials) as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(httpx.TransportError):
            await stack.http.get("/health")

        first = await asyncio.to_thread(shown, port)
        caplog.set_level(logging.INFO)
        (tmp_path / "tls.key").write_bytes(b"nothing")
        await eventually(lambda: "the public certificate is not renewed" in caplog.text)
        assert await asyncio.to_thread(shown, port) == first
        write(tmp_path, authority)
        await eventually(lambda: "public certificate renewed" in caplog.text)
        assert await asyncio.to_thread(shown, port) != first
        assert await asyncio.to_thread(shown, grpc_port) == await asyncio.to_thread(shown, port)


def test_files_that_are_no_certificate_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = write(tmp_path, Authority.new(timedelta(days=2)))
    monkeypatch.setenv("RYZANSTEIN_GATEWAY_TLS_CERTIFICATE", files["gateway_tls_certificate"])
    with pytest.raises(StartupError, match="RYZANSTEIN_GATEWAY_TLS_KEY: set both"):
        read_settings(GatewaySettings)
    monkeypatch.setenv("RYZANSTEIN_GATEWAY_TLS_KEY", str(tmp_path / "none"))
    with pytest.raises(StartupError, match="RYZANSTEIN_GATEWAY_TLS_KEY hold no certificate with its key"):
        read_settings(GatewaySettings)
