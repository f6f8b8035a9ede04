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
    """Let gRPC's poller never wait for the loop: a byte that finds no room is dropped, since others wake the loop.

    Call it before the first channel or server of the process, which must have one event loop: an event of a closed
    loop ends the reading with an error, and takes a byte with it that the events behind it would need.
    """
    cygrpc.socket = SimpleNamespace(**(vars(socket) | {"socketpair": _wakeup_pair}))


def _wakeup_pair() -> tuple[socket.socket, socket.socket]:
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    # The smallest buffer, room for a few bytes: each byte is an iteration of the loop, and one of them would do.
    writer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    return reader, writer
