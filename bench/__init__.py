"""Benchmarks of Ryzanstein and comparisons with other servers."""

import services  # noqa: F401  # sets gRPC up as services do, before a benchmark's client imports it
