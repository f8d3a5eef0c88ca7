"""`make release`: what a version consists of, built from one commit into one folder.

    python -m release [--dist dist] [--no-image] [--allow-changes]

It reads no network where the caches of `make venv` and `make images` are full, and writes the same bytes each time.
"""
