"""The agent's decisions: its state, the events, the effects, and the one function that maps between them. Pure."""
