"""Clients of routers and workers, and the catalog of models."""
