"""Usage of requests and its cost: counted once, kept by time, read by the usage API."""
