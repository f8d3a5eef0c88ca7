"""Read a job and the objects around it from the API server, at the time of a reconcile."""
