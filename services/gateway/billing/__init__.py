"""What requests used and what that costs: counted once, kept by time, read by the usage API."""
