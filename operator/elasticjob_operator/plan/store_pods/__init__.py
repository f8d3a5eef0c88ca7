"""The job's store pods: which one serves, when it is replaced, and the standby. Pure."""
