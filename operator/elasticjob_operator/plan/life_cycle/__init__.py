"""Begin and end of an execution: queue, suspension, defaults, policies, outcome. Pure."""
