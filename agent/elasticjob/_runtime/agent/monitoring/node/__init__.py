"""Checks of the pod's node: health, GPUs, and whether the network cuts it off."""
