"""The OpenAI-compatible REST API."""
