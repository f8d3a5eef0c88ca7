"""What `elasticjob run` shows on a terminal."""
