"""How workers end: the exit seen early, its cause, and what an exiting process still holds."""
