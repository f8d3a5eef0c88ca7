"""The same training at any world size: samplers that hold the position of all ranks, and a constant global batch.

`step_plan`, `epoch_position` and `training_step` do not import torch.
"""
