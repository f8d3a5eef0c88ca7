"""Main program of a worker of `elasticjob.launch`: `python -m elasticjob._runtime.local.launch_entry FOLDER`."""

from __future__ import annotations

import os
import pickle
import sys
from multiprocessing import spawn
from pathlib import Path

from elasticjob._runtime.contract.names import Env

CALL = "call.pickle"
"""File name of the function and its arguments."""
VALUE = ".value"
"""File name suffix of a return value."""


def main(folder: Path) -> None:
    """Call the function as a process spawned by the caller would, and write its return value.

    The file is `<round>-<rank>.value`. It gets this name once it is complete.
    """
    with (folder / CALL).open("rb") as file:
        preparation = pickle.load(file)  # noqa: S301  # written by our own caller
        spawn.prepare(preparation)
        function, args = pickle.load(file)  # noqa: S301
    value = function(*args)
    path = folder / f"{os.environ[Env.ROUND]}-{os.environ['RANK']}"
    path.write_bytes(pickle.dumps(value))
    path.rename(path.with_name(path.name + VALUE))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
