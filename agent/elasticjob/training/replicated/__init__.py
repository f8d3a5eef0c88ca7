"""`elasticjob.State`: the state of a training loop that is the same on every rank, in the memory of its pod."""
