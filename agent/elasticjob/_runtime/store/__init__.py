"""torch's TCPStore protocol: server and client. Standard library only."""
