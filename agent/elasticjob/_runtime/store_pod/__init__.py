"""The store pod of a job: its TCPStore server and its coordinator, in one process."""
