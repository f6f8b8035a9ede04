"""Simulated users of a running installation; `make loadtest` starts an installation for them.

    locust -f loadtest/locustfile.py --host http://127.0.0.1:8000 --grpc 127.0.0.1:8001

Classes that are named at the end of the command line run alone.
"""

from __future__ import annotations

from locust import events
from locust.argument_parser import LocustArgumentParser

from loadtest.users.rest import ChatUser, CompletionUser
from loadtest.users.rpc import GrpcUser
from loadtest.users.socket import SocketUser

__all__ = ["ChatUser", "CompletionUser", "GrpcUser", "SocketUser"]


@events.init_command_line_parser.add_listener
def add_options(parser: LocustArgumentParser) -> None:
    """Options of the users besides --host."""
    parser.add_argument("--grpc", default="127.0.0.1:8001", help="Address of the public gRPC API.")
    parser.add_argument("--think", type=float, default=3.0, help="Median think time in seconds.")
