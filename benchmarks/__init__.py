"""Measures ours against stock torchrun: `python -m benchmarks --help`. One family of rows a file."""
