"""torch's error file of a worker: the exception that ends it, where torchrun's `@record` writes it too."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType


def record_exception(path: str, error: BaseException) -> None:
    """Write the exception to the file in the format of torch's `@record`, unless the file exists."""
    if os.path.exists(path):  # noqa: PTH110
        return
    import json
    import time
    import traceback

    extra = {"py_callstack": "".join(traceback.format_exception(error)), "timestamp": str(int(time.time()))}
    data = {"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}}
    try:
        with open(path, "w") as file:
            json.dump(data, file)
    except OSError as cause:
        print(f"cannot write {path}: {cause}", file=sys.stderr)


def record_at_end(path: str) -> None:
    """Let this process record the exception that ends it, in addition to what it does with it anyway.

    A process may need seconds from its traceback to its exit. Its peers notice meanwhile that it has closed its
    connections, and end before it does: only this file shows then which failure came first.
    """
    before, pid = sys.excepthook, os.getpid()

    def record(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() == pid and isinstance(error, Exception):  # not in a forked child, and no Ctrl-C
            try:
                record_exception(path, error)
            except Exception as cause:  # its text cannot be made, for example
                print(f"cannot record the exception: {cause!r}", file=sys.stderr)
        before(kind, error, trace)

    sys.excepthook = record
