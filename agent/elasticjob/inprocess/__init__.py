"""Rounds without new processes: a training function is interrupted and called again in the same process."""
