"""The store pod of a job: its TCPStore and its coordinator in one process."""
