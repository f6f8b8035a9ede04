"""The request bodies of all APIs."""
