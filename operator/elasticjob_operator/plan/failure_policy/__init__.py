"""Failures, the rules that match them, and the budget of restarts. Pure."""
