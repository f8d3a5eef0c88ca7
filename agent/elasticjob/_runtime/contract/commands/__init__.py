"""Commands of training containers: Python, torchrun, and how many workers a pod has. Pure."""
