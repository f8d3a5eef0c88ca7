"""How a round ends, and what follows. Pure."""
