"""The format of a training state in shared memory and in files, which agents and workers read."""
