"""Start workers: Python commands, also inside a shell, as forks of the fork server; all other commands by exec."""
