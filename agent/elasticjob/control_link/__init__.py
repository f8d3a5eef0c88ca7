"""The control link: authenticated messages between nodes, operator and coordinator, on the store's port."""
