"""What workers do: steps, hangs, start times, and what their scripts report."""
