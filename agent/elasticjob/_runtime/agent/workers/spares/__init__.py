"""Processes that wait at the script's function, and take the place of a rank's process."""
