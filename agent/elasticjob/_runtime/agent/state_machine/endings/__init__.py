"""How workers, and the agent's part in the job, end."""
