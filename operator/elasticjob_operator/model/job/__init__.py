"""A job: its spec with all defaults, and its status as an earlier reconcile wrote it. Pure."""
