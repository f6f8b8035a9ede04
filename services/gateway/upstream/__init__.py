"""Clients of the other services: routers, workers, and what they know of the models."""
