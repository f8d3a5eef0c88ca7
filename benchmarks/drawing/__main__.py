"""Write the pictures of the documentation to docs/img."""

from __future__ import annotations

from benchmarks.drawing.pictures import IMAGES, load, pictures

for name, text in pictures(load()).items():
    (IMAGES / f"{name}.svg").write_text(text)
    print(IMAGES / f"{name}.svg")
