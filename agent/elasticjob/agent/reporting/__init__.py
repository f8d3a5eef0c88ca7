"""What a node tells: its workers' output, metrics, health, and the termination message."""
