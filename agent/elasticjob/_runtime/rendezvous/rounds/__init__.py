"""How a round forms and ends. Pure."""
