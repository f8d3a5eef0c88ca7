"""What an agent does about what happens to it: states, events, effects, and the one function over them. Pure."""
