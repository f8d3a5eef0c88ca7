"""A command that starts launchers, and so runs once in its pod."""
