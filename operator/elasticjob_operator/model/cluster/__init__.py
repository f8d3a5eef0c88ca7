"""The objects of the cluster around a job: pods, Nodes, Workloads, LimitRanges. Pure."""
