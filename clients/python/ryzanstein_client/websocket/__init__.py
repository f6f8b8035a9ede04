"""The WebSocket transport; needs the extra `websocket`."""

from ryzanstein_client.websocket.client import WebSocketClient

__all__ = ["WebSocketClient"]
