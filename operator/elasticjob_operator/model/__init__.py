"""What the operator reads from the API server, parsed from raw JSON into frozen dataclasses. Pure."""
