"""Refusals of an installation under mutual TLS: callers by methods, and strangers at every port."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Collection, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import grpc
import grpc.aio

from services.common.rpc import open_channel
from services.common.tls.access import CALLERS, COMPONENTS
from services.common.tls.certificate import AUTHORITIES, CERTIFICATE, KEY, Identity
from services.common.tls.credentials import Tls
from services.common.tls.issuing import Authority
from tests.certificates import DAY, write

SILENT_S = 60.0
DENIED = grpc.StatusCode.PERMISSION_DENIED
HEALTH = "grpc.health.v1.Health/Check"


@dataclass(frozen=True)
class Trusting:
    """The servers of one installation, each in a process of its own, and what it takes to call them."""

    folder: Path  # with one of each component's certificate, by its name
    authority: Authority
    domain: str
    addresses: Mapping[str, str]  # by component


async def outcome(channel: grpc.aio.Channel, method: str) -> grpc.aio.AioRpcError | None:
    """How a call with one empty message ends, or None at its first answer."""
    call = channel.unary_stream(f"/{method}")(b"")  # on the wire as a stream of one message
    try:
        async with asyncio.timeout(SILENT_S):
            async for _ in call:
                break
    except grpc.aio.AioRpcError as error:
        return error
    finally:
        call.cancel()
    return None


def at(method: str) -> str:
    """The component that serves a method."""
    service = method.partition("/")[0].rpartition(".")[2]
    return {"Router": "router", "ExternalScaler": "router", "KvCoordinator": "coordinator"}.get(service, "worker")


def code(error: grpc.aio.AioRpcError | None) -> grpc.StatusCode:
    """A call's status."""
    return grpc.StatusCode.OK if error is None else error.code()


async def assert_callers_are_kept_to_their_methods(
    it: Trusting, untried: Collection[tuple[str, str]] = frozenset()
) -> None:
    """Every component calls every method; `untried`: allowed calls that would change the installation."""
    async with AsyncExitStack() as stack:
        # Draining the worker comes last: nothing is served then.
        methods = sorted(CALLERS, key=lambda method: (method.endswith("/Drain"), method))
        for caller in COMPONENTS:
            tls = Tls(it.folder / caller)
            channels = {
                to: await stack.enter_async_context(open_channel(address, to=to, tls=tls))
                for to, address in it.addresses.items()
            }
            for method in methods:
                if (caller, method) in untried:
                    continue
                error = await outcome(channels[at(method)], method)
                refused = error is not None and error.code() is DENIED
                assert refused is (caller not in CALLERS[method]), (caller, method, error)
                if error is not None and refused:
                    allowed = ", ".join(sorted(CALLERS[method])) or "nobody"
                    assert error.details() == f"{caller} may not call {method}, which {allowed} may"


async def assert_strangers_are_refused(it: Trusting, folder: Path) -> None:
    """No port lets in who has no certificate, one of another CA or installation, or one that has ended."""
    authorities = (it.folder / "gateway" / AUTHORITIES).read_bytes()
    expired = write(folder / "expired", "gateway", it.authority, life=timedelta(seconds=-1), domain=it.domain)
    shown = {
        "without": (None, None),
        "other CA": _pem(write(folder / "other", "gateway", Authority.new(DAY), domain=it.domain)),
        "expired": _pem(expired),
        "elsewhere": _pem(write(folder / "elsewhere", "gateway", it.authority, domain="rz.other")),
    }
    for to, address in it.addresses.items():
        name = ("grpc.ssl_target_name_override", Identity(it.domain, to).host)
        for who, (key, chain) in shown.items():
            credentials = grpc.ssl_channel_credentials(authorities, key, chain)
            async with grpc.aio.secure_channel(address, credentials, options=[name]) as channel:
                error = await outcome(channel, HEALTH)
            expected = DENIED if who == "elsewhere" else grpc.StatusCode.UNAVAILABLE
            assert code(error) is expected, (to, who, error)
        async with open_channel(address) as channel:
            error = await outcome(channel, HEALTH)
            assert code(error) is grpc.StatusCode.UNAVAILABLE, (to, error)
    for to in it.addresses:
        agreed = [await _agreed(it, to, newest) for newest in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3)]
        assert agreed == ["none", "TLSv1.3"], (to, agreed)
    # A component that answers in another one's place is not believed.
    async with open_channel(it.addresses["worker"], to="router", tls=Tls(it.folder / "gateway")) as channel:
        assert code(await outcome(channel, HEALTH)) is grpc.StatusCode.UNAVAILABLE


def _pem(folder: Path) -> tuple[bytes, bytes]:
    return (folder / KEY).read_bytes(), (folder / CERTIFICATE).read_bytes()


async def _agreed(it: Trusting, to: str, newest: ssl.TLSVersion) -> str | None:
    """The version that a server agrees on with a client that speaks nothing newer."""
    folder, (host, _, port) = it.folder / "gateway", it.addresses[to].rpartition(":")
    context = ssl.create_default_context(cafile=folder / AUTHORITIES)
    context.load_cert_chain(folder / CERTIFICATE, folder / KEY)
    context.maximum_version = newest
    context.set_alpn_protocols(["h2"])
    server_name = Identity(it.domain, to).host
    try:
        _, writer = await asyncio.open_connection(host, int(port), ssl=context, server_hostname=server_name)
    except (ssl.SSLError, ConnectionError):
        return "none"
    version: str | None = writer.get_extra_info("ssl_object").version()
    writer.close()
    return version
