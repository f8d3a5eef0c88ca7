"""`elasticjob logs`: `logs` chooses the pods, `log_streams` follows them, `log_lines` chooses their lines."""
