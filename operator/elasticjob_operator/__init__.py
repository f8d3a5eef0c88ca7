"""The operator: reconciles ElasticJobs into pods, Services and status."""
