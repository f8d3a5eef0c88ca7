"""Pictures of the documentation as SVG: `python -m benchmarks.drawing` writes docs/img."""
