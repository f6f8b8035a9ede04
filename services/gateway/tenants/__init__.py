"""API keys, rate limits, quotas and the response cache."""
