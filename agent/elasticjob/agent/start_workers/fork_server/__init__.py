"""What runs in the warm process and in its forks: imports once, workers many times."""
