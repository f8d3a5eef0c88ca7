"""Which tensors of the training state have changed without the optimizer, or cannot change."""
