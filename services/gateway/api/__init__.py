"""The bodies of requests, whichever API they take."""
