"""Entry point of the workers of `elasticjob.launch`: `python -m elasticjob.local.launch_entry FOLDER`."""

from __future__ import annotations

import os
import pickle
import sys
from multiprocessing import spawn
from pathlib import Path

from elasticjob.contract.names import Env

CALL = "call.pickle"
VALUE = ".value"


def main(folder: Path) -> None:
    """Call it as a spawned process of the caller would; what it returns goes to a file named by round and rank."""
    with (folder / CALL).open("rb") as file:
        preparation = pickle.load(file)  # noqa: S301  # our own caller's
        spawn.prepare(preparation)
        function, args = pickle.load(file)  # noqa: S301
    value = function(*args)
    path = folder / f"{os.environ[Env.ROUND]}-{os.environ['RANK']}"
    path.write_bytes(pickle.dumps(value))
    path.rename(path.with_name(path.name + VALUE))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
