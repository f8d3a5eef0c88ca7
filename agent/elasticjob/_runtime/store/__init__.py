"""torch's TCPStore protocol: the server, and what a client sends. Standard library only."""
