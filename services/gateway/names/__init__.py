"""Routes: names that requests may give instead of a model's, from the installation's file and from Redis."""
