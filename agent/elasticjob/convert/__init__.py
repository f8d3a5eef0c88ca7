"""`elasticjob convert`: ElasticJobs from PyTorchJobs, TrainJobs, HyperPodPyTorchJobs and JobSets."""
