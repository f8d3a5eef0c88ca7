"""`python` and `torchrun` below a shell: programs that stand for a fork of the fork server."""
