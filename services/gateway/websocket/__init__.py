"""Token streams over WebSocket."""
