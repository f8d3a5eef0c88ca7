"""A real Kubernetes of several nodes on one Linux machine; `verbs` is what tests, demo and benchmarks call."""
