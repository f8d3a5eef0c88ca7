"""How one event changes the state of a coordinator, and the direct answers to it. Pure."""
