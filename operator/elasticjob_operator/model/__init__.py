"""What the operator knows, as frozen dataclasses parsed from raw JSON. Pure."""
