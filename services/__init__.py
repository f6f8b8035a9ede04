"""Ryzanstein's services. They share `services.common` and the contracts in `proto/`, and never import each other."""

import os

# Read once, when gRPC is first imported. Its event engine hands every message from thread to thread; the poller that it
# replaces answers sooner (docs/adr/012-grpc-without-its-event-engine.md).
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
