"""What the coordinator measures during rounds: stalls, stragglers, slow starts, lost time. Pure."""
