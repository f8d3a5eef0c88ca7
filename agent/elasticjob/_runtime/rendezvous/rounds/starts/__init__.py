"""When a round starts, with which agents and ranks. Pure."""
