"""Mutual TLS between services: certificates that are watched, channels that follow them, and who may call what."""
