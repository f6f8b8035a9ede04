"""REST: requests decoded, generations called, answers encoded."""
