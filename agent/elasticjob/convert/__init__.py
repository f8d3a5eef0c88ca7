"""`elasticjob convert`: ElasticJobs from Kubeflow's PyTorchJobs and TrainJobs."""
