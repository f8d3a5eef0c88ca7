"""Which job is reconciled next: one at a time for each job, in turns for each namespace."""
