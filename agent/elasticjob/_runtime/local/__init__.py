"""`elasticjob run job.yaml`: run a job as processes of this machine, with the store and the agent of a cluster job."""
