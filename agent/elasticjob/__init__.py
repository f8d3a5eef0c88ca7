"""Elastic PyTorch jobs: the agent, the store and what training code imports."""

__version__ = "0.1.0"
