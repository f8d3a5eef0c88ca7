"""Run a command where the look-up of a name hangs: `python silent_nameserver.py FILE COMMAND...`, as root.

The command has a network and a resolv.conf of its own, which is written to FILE. Its nameserver receives each request
and answers none.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

_CONFIGURATION = "nameserver 127.0.0.1\noptions timeout:30 attempts:5\n"
"""A look-up takes 150 s."""
_PORT = 53


def command(folder: Path) -> list[str]:
    """Return a command that runs the command in its arguments with such a nameserver."""
    return ["unshare", "--net", "--mount", sys.executable, __file__, str(folder / "resolv.conf")]


def was_asked(pid: int) -> bool:
    """Return whether a process's nameserver has received a request."""
    for line in Path(f"/proc/{pid}/net/udp").read_text().splitlines()[1:]:
        fields = line.split()
        if int(fields[1].rpartition(":")[2], 16) == _PORT and int(fields[4].rpartition(":")[2], 16) > 0:
            return True
    return False


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(_CONFIGURATION)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    subprocess.run(["mount", "--bind", str(path), "/etc/resolv.conf"], check=True)
    nameserver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    nameserver.bind(("127.0.0.1", _PORT))
    nameserver.set_inheritable(True)
    os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606
