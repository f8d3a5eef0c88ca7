"""Names, exit codes and messages shared by operator, store, agent and tests. Standard library only."""
