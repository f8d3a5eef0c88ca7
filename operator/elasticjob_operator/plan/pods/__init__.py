"""Worker pods: which indices have one, what is created, kept, replaced or deleted. Pure."""
