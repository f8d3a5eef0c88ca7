"""Monitors: progress, hangs and exits of workers, and health and reachability of this pod."""
