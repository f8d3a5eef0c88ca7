"""The fork server and its forks: one process imports modules once, then forks workers from itself."""
