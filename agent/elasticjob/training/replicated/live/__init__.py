"""The training state of the process that still runs, in shared memory."""
