"""The next status: conditions, figures, and the Events about what changed. Pure."""
