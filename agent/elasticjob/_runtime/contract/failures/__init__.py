"""Failures in words, the rules about them, and the restarts that count. Pure."""
