"""REST: decodes requests, calls generations, encodes answers."""
