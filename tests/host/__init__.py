"""What the bare cluster and the image builder need of this machine. Standard library only."""
