"""Mutants of the pure decisions, each of which the explorer in tests/model must catch."""
