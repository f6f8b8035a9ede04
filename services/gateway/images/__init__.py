"""Images of requests: read, bounded, and cut into the frames that a model takes."""
