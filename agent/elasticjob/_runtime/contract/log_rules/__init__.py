"""`spec.logRules`: what the output of workers tells of the training."""
