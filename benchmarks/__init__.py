"""Benchmarks of this project against stock torchrun: `python -m benchmarks --help`. Each module has related rows."""
