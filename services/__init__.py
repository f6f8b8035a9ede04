"""Ryzanstein's services. They share `services.common` and the contracts in `proto/`, and never import each other.

gRPC reads its variables once, when it is first imported, so they are set before any module of a service is.
"""

import os

# Its event engine hands every message from thread to thread; the poller that it replaces answers sooner
# (docs/adr/012-grpc-without-its-event-engine.md).
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
# Its core writes lines of its own to stderr, about ended connections for example. Its errors also arrive as exceptions
# or statuses.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# TLS 1.3 only: of the ciphers of TLS 1.2, gRPC gets one that needs a key which neither side has.
if os.environ.get("RYZANSTEIN_TLS_FOLDER"):
    os.environ.setdefault("GRPC_SSL_CIPHER_SUITES", "ECDHE-PSK-AES128-CBC-SHA")
