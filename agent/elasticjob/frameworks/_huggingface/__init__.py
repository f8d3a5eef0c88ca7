"""Parts of `elasticjob.frameworks.huggingface`: the fields and the options of a Trainer."""
