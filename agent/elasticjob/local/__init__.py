"""`elasticjob run job.yaml`: the same manifest as processes of this machine, with the same store and agent."""
