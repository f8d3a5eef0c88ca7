"""The control link: authenticated messages between agents, operator and coordinator, on the store's port.

`frames` cuts a connection into frames, `link` authenticates both sides and carries messages, `coordinator_client` keeps
one agent connected.
"""
