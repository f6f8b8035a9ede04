"""Responses that outlive a request: jobs in the background, and WebSockets with many responses."""
