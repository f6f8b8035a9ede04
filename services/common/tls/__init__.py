"""Mutual TLS between services: watched certificates, channels that follow them, and the callers of each method."""
