"""A real Kubernetes cluster of several nodes on one Linux machine. Tests, demo and benchmarks call `verbs`."""
