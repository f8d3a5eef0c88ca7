"""Checks of the arguments of `Wrapper` and of hooks."""
