"""Tool calls in what models write: one parser a format."""
