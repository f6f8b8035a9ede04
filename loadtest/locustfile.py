"""Users of a running installation; `make loadtest` starts one for them.

    locust -f loadtest/locustfile.py --host http://127.0.0.1:8000 --grpc 127.0.0.1:8001

Name classes at the end of the command line to run only some of them.
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
    """What the users need to know beside --host."""
    parser.add_argument("--grpc", default="127.0.0.1:8001", help="Address of the public gRPC API.")
    parser.add_argument("--think", type=float, default=3.0, help="Median think time in seconds.")
