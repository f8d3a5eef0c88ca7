"""Watches: what the API server sends by itself, and the cache that keeps it."""
