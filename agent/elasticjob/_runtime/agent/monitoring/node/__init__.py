"""Checks of the pod's Node: health, GPUs, and whether the network cuts it off."""
