"""`elasticjob.ShardedState`: the state of models whose parameters are sharded over ranks (FSDP2, HSDP)."""
