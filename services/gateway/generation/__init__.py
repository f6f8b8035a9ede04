"""The one pipeline behind REST, WebSocket and gRPC."""
