"""How workers start: by a fork of the warm process where the command is Python, also inside a shell; else by exec."""
