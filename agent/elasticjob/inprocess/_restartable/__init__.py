"""`@elasticjob.restartable`: an agent has a training function called again, in the same process."""
