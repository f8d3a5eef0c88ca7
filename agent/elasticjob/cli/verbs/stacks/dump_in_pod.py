"""Runs in a worker pod, by `python -c`: ask each worker for its stacks and print them as lines of JSON.

It uses the standard library only and stands alone, because the pod may have another version of elasticjob. A worker
that can dump its stacks has a handler for the signal, and its file is open: `.../ROUND-LOCAL_RANK/stacks`.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from contextlib import suppress
from pathlib import Path

SIGNAL = 57
SECONDS = 5.0
SETTLED = 0.3
MOST = 1 << 18
FILE = re.compile(r"/(\d+\.\d+\.\d+)-(\d+)/stacks$")


def read_status(pid: int) -> dict[str, str]:
    """Return the fields of /proc/PID/status; none for a process that has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return {}
    return {name: value for name, _, value in (line.partition(":\t") for line in lines)}


def stack_file(pid: int) -> tuple[str, int] | None:
    """Return (path, local rank) of a process's open stack dump file, or None."""
    with suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            path = str(link.readlink())
            if match := FILE.search(path):
                return path, int(match[2])
    return None


def size(path: str) -> int:
    try:
        return Path(path).stat().st_size
    except OSError:
        return 0


def read(path: str, start: int) -> str:
    try:
        with Path(path).open("rb") as file:
            file.seek(start)
            return file.read(MOST).decode(errors="replace")
    except OSError:
        return ""


def find_workers() -> dict[int, tuple[str, int]]:
    """Return {pid: (path, local rank)}, without the children of workers, which inherit file and handler."""
    found = {}
    for pid in (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()):
        caught = int(read_status(pid).get("SigCgt", "0"), 16)
        if caught >> (SIGNAL - 1) & 1 and (file := stack_file(pid)):
            found[pid] = file
    return {
        pid: file
        for pid, file in found.items()
        if found.get(int(read_status(pid).get("PPid", "0")), ("", 0))[0] != file[0]
    }


def main() -> None:
    workers = find_workers()
    # A frozen process handles no signal: it would dump its stacks when it goes on, into the file of a later dump.
    asked = [pid for pid in workers if not read_status(pid).get("State", "").startswith("T")]
    before = {pid: size(workers[pid][0]) for pid in workers}
    for pid in asked:
        with suppress(OSError):
            os.kill(pid, SIGNAL)
    end, since = time.monotonic() + SECONDS, 0.0
    last: dict[int, int] = {}
    while asked and time.monotonic() < end:
        sizes = {pid: size(workers[pid][0]) for pid in asked}
        if sizes != last:
            last, since = sizes, time.monotonic()
        elif all(sizes[pid] > before[pid] for pid in asked) and time.monotonic() - since > SETTLED:
            break
        time.sleep(0.05)
    for pid, (path, local_rank) in workers.items():
        stacks = read(path, before[pid])
        state = "" if stacks else read_status(pid).get("State", "it has ended")
        print(json.dumps({"localRank": local_rank, "pid": pid, "stacks": stacks, "state": state}))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
