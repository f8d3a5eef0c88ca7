"""The store of a job: torch's TCPStore protocol and the control link on one port. Standard library only."""
