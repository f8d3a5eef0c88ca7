"""One worker process: its states, the table of all, how it ends and why it ended."""
