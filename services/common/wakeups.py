"""Wake-ups of the event loop by gRPC's poller thread.

The thread puts each event into a queue and writes a byte to a socket pair; the loop reads one byte in an iteration and
takes all events. While iterations are long, the bytes fill the socket, some 280. From then on the thread waits in its
write for the next iteration, and the loop gets two events an iteration, however many have arrived. Heartbeats come
late, and live peers count as silent. https://github.com/grpc/grpc/pull/40989 describes the same wait at shutdown.
"""

from __future__ import annotations

import socket
from types import SimpleNamespace

from grpc._cython import cygrpc  # type: ignore[attr-defined]


def coalesce_wakeups() -> None:
    """Let gRPC's poller never wait for the loop: a byte that finds no room is dropped, since 280 others wake the loop.

    As many events of closed loops may be in the queue: each raises an error where another loop reads it, and the next
    byte goes on from there.

    Call it before the first channel or server of the process.
    """
    if cygrpc.socket is socket:
        cygrpc.socket = SimpleNamespace(**(vars(socket) | {"socketpair": _wakeup_pair}))


def _wakeup_pair() -> tuple[socket.socket, socket.socket]:
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    return reader, writer
