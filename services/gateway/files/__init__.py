"""Files of requests, which models read as text."""
