"""What the agent reports besides its messages: workers' output, metrics, health, and the termination message."""
