"""Copies of the training state at a commit, made beside the training."""
