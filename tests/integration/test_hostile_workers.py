"""What a worker writes does not break its agent, and its failure counts like any other."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticjob._runtime.contract.names import Env
from support.agent.worker_scripts import script
from support.local.run import LocalRun, manifest

NESTED = """
import os, sys
open(os.environ["TORCHELASTIC_ERROR_FILE"], "w").write('{"message":' * 100_000)
sys.exit("nested too deeply")
"""
FIFO = """
import os, sys
os.mkfifo(os.environ["TORCHELASTIC_ERROR_FILE"])
sys.exit("no regular file")
"""
TRUNCATES = f"""
import json, os, socket, sys, time
connection = socket.socket(socket.AF_UNIX)
connection.connect(os.environ[{Env.AGENT_SOCKET!r}])
connection.send(json.dumps({{"local_rank": 0, "round": os.environ[{Env.ROUND!r}]}}).encode())
_, (page, *_), _, _ = socket.recv_fds(connection, 1, 16)
try:
    os.ftruncate(page, 0)
except PermissionError:
    pass
sys.exit("cut off its page")
"""
ESCAPES = r"""
class Red(Exception):
    pass
raise Red("\x1b]0;owned\x07 \x1b[31mred \x9b31m")
"""
NOT_UTF_8 = r"""
import os, sys
sys.stderr.buffer.write(b"\xff\xfe \x1b[31m\n")
open(os.environ["TORCHELASTIC_ERROR_FILE"], "wb").write(b'{"message": "\xff\x1b\ud800"}')
sys.exit(1)
"""
HUGE_NUMBERS = f"""
import json, os, socket, sys
for hello in (
    {{"local_rank": 10**400, "round": "1.0.1"}}, {{"local_rank": 1e300, "round": "1.0.1"}},
    {{"received": {{"size": 10**400, "seconds": 1, "rank": 0}}, "round": "1.0.1"}}, ["received"], "received", 7,
):
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(os.environ[{Env.AGENT_SOCKET!r}])
    connection.send(json.dumps(hello).encode())
    connection.recv(1)
connection = socket.socket(socket.AF_UNIX)
connection.connect(os.environ[{Env.AGENT_SOCKET!r}])
connection.send(b"[" * 1000)
connection.recv(1)
sys.exit("sent numbers")
"""


@pytest.mark.parametrize("text", [NESTED, FIFO, TRUNCATES, ESCAPES, NOT_UTF_8, HUGE_NUMBERS])
def test_a_worker_that_writes_nonsense_fails_and_its_agent_goes_on(text: str, tmp_path: Path) -> None:
    job = manifest(script(tmp_path, text), replicas=1, failurePolicy={"maxRestarts": 1})
    with LocalRun(job, tmp_path) as run:
        assert run.exit_code() == 1
    assert "1 restart (" in run.text
    assert "toy-0-1" not in run.text  # a replaced agent would not count against maxRestarts in time
    own = [line for line in run.lines if line.startswith(("[job]", "[agent]"))]
    assert not [line for line in own if not line.isprintable()]
    if text is ESCAPES:
        assert r"Red: \x1b]0;owned\x07 \x1b[31mred \x9b31m" in run.lines[-1]
