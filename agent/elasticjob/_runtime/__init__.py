"""What runs in pods and below `elasticjob run`: agent, store, coordinator, and what they share.

Scripts import none of it by these paths. What is public and implemented here has another name: `elasticjob.launch`, and
torchrun's handler `elasticjob`.
"""
