"""How a round begins and ends for one agent."""
