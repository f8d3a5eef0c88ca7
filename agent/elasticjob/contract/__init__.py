"""What operator, store, agent and tests must agree on: names, exit codes and messages. Standard library only."""
