"""The demo's training image, like a user's: Debian's torch and the example, without elasticjob."""

from __future__ import annotations

import hashlib
import tarfile
from typing import IO

from images import oci
from images.debian import Root
from images.elasticjob import REPOSITORY, layer, version

EXAMPLE = REPOSITORY / "examples/digits"
FILES = ("train.py", "digits.csv.gz")

ROOT = Root(
    variant="minbase",
    packages=["python3", "python3-numpy", "python3-torch"],
    dropped=[
        "usr/include/*",
        "usr/lib/libtorch-test/*",
        "usr/lib/python3/dist-packages/torch/bin/test_*",
        "usr/lib/python3/dist-packages/*/tests/*",
        "usr/lib/*/*.a",
    ],
)

CONFIG = {
    "Env": ["PATH=/usr/local/bin:/usr/bin:/bin", "OMP_NUM_THREADS=1"],
    "Cmd": ["python3", "/app/train.py"],
    "WorkingDir": "/app",
}


def build(cache: oci.Cache) -> oci.Image:
    """Build the image with the example of this checkout."""
    root = layer(cache, oci.Recipe("elasticjob-digits: Debian and torch (about 2 min)", ROOT.inputs, ROOT.make))
    contents = {name: (EXAMPLE / name).read_bytes() for name in FILES}

    def make(output: IO[bytes]) -> None:
        with tarfile.open(fileobj=output, mode="w|") as tar:
            oci.add_folder(tar, "app")
            for name, content in contents.items():
                oci.add_file(tar, f"app/{name}", content)

    digests = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    example = cache.layer(oci.Recipe("elasticjob-digits: the example", {"files": digests, "recipe": 1}, make))
    return oci.Image(f"elasticjob-digits:{version()}", [root, example], CONFIG)
