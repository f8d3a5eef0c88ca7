"""One call of a wrapped function with all its restarts: what `Wrapper` starts."""
