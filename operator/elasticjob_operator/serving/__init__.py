"""What the operator serves: probes and metrics."""
