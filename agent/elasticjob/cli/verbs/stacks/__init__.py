"""`elasticjob stacks`: `stacks` asks the worker pods, `dump_in_pod` runs in them."""
