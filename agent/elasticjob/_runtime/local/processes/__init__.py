"""The processes of `elasticjob run`, and who ends them if it is killed."""
