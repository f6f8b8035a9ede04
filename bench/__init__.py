"""What is fast, what is not, and compared with whom."""

import services  # noqa: F401  # sets gRPC up as services do, before a benchmark's client imports it
