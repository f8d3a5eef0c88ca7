"""What runs in pods and below `elasticjob run`: agent, store, coordinator, and what they share. Scripts import none."""
