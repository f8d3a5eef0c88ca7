"""Copies of the training state at a commit, made while the training goes on."""
