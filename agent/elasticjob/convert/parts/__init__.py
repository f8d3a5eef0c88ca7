"""Parts that the jobs of several kinds have in common. Pure."""
