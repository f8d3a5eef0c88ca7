"""Agents on nodes that lack something usual: a function of Python, writable folders, open files."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from elasticjob._runtime.contract.names import Env
from elasticjob._runtime.store.open_files import connection_limit
from elasticjob._runtime.system.code_root import CODE_ROOT, program
from support.agent.lone_agent import OWN_COORDINATOR, lone_agent_environment
from support.agent.worker_scripts import script
from support.local.run import LocalRun, manifest

AGENT = [*program(), "agent", "--", "true"]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")

# ---- a Python without os.memfd_create ------------------------------------------------------------------------------

WITHOUT_MEMFD = "import os\ndel os.memfd_create, os.MFD_CLOEXEC\n"
KEEPS_STATE = """
import os
import torch.distributed as dist
import elasticjob

assert not hasattr(os, "memfd_create")
dist.init_process_group("gloo")
state = elasticjob.State(step=0)
state.sync()
restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
print(f"restart {restart} rank {dist.get_rank()} step {state.step}", flush=True)
if restart == "0":
    state.step = 7
    state.commit()
    dist.barrier()
    os._exit(3)
dist.destroy_process_group()
"""


@pytest.mark.torch
def test_a_python_without_memfd_create_keeps_the_training_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(WITHOUT_MEMFD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    job = manifest(script(tmp_path, KEEPS_STATE), nprocPerNode=2, preload=["torch"])
    with LocalRun(job, tmp_path) as run:
        assert run.exit_code(240) == 0, run.text
    for rank in (0, 1):
        assert f"restart 0 rank {rank} step 0" in run.text
        assert f"restart 1 rank {rank} step 7" in run.text


# ---- a read-only root file system, and a user without rights -------------------------------------------------------

READ_ONLY = """
set -e
mount --make-rprivate /
[ -z "$WRITABLE" ] || mount --bind "$WRITABLE" "$WRITABLE"
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
[ "$READ_ONLY_SHM" != yes ] || mount -o remount,bind,ro /dev/shm
mount -o remount,bind,ro /
# The capability to read stands for an image whose files every user may read.
capability=+dac_read_search
exec setpriv --reuid $USER_ID --regid $USER_ID --clear-groups --inh-caps $capability --ambient-caps $capability "$@"
"""
WITHIN = ["unshare", "--mount", "bash", "-c", READ_ONLY, "bash"]
USES_FOLDERS = """
import os, tempfile
import torch
from pathlib import Path

for path in ("/tmp/x", "/var/tmp/x", "x"):
    try:
        Path(path).write_text("x")
    except OSError as error:
        print(f"{path}: {error.strerror}", flush=True)
with tempfile.TemporaryDirectory() as folder:
    print("user", os.getuid(), "folder", Path(folder).parent, flush=True)
"""


@needs_root
@pytest.mark.torch
@pytest.mark.parametrize(("launcher", "user"), [("python", "12345"), ("torchrun", "12345"), ("shell", "0")])
def test_a_read_only_root_without_a_temporary_folder_needs_no_volume(
    launcher: str, user: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A shell's Python is found by access(2), which ignores the capability: that node runs as root.
    monkeypatch.setenv("USER_ID", user)
    monkeypatch.setenv("TMPDIR", "/dev/shm")  # for `elasticjob run` itself
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    python = script(tmp_path, USES_FOLDERS)
    path = python[1]
    commands: dict[str, Sequence[str]] = {
        "python": python,
        "shell": ["sh", "-c", f"python {path}"],
        "torchrun": [sys.executable, "-m", "torch.distributed.run", path],
    }
    rendezvous = {"backend": "c10d" if launcher == "torchrun" else "elasticjob"}
    job = manifest(commands[launcher], preload=["torch", "torch._dynamo"], rendezvous=rendezvous)
    container = job["spec"]["template"]["spec"]["containers"][0]  # type: ignore[index]
    container["env"] = [{"name": "TMPDIR", "value": ""}]
    with LocalRun(job, tmp_path, within=WITHIN) as run:
        assert run.exit_code(240) == 0, run.text
    assert f"user {user} folder /dev/shm" in run.text
    for path in ("/tmp/x", "/var/tmp/x", "x"):
        assert f"{path}: Read-only file system" in run.text
    assert "fork server ready" in run.text
    assert "not imported" not in run.text


@needs_root
def test_without_any_writable_folder_the_termination_message_says_what_to_mount(tmp_path: Path) -> None:
    log = tmp_path / "termination"
    log.touch()
    log.chmod(0o666)
    done = run_agent(log, argv=[*WITHIN, *AGENT], USER_ID="12345", WRITABLE=str(log), READ_ONLY_SHM="yes")
    assert done.returncode == 64, done.stderr
    termination = json.loads(log.read_text())
    assert (termination["outcome"], termination["reason"]) == ("Error", "UsageError")
    assert "mount an emptyDir at /tmp" in termination["message"]
    assert done.stderr == f"elasticjob agent: {termination['message']}\n"


# ---- other errors before the event loop ----------------------------------------------------------------------------


def run_agent(log: Path, *, argv: Sequence[str] = AGENT, **env: str) -> subprocess.CompletedProcess[str]:
    """Run one agent that finds no store, with its termination message at `log`."""
    environment = {**lone_agent_environment(log), Env.JOIN_TIMEOUT_SECONDS: "0", **env}
    return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60, check=False)


OLD_PYTHON = "import sys\nsys.version_info = (3, 9, 2)\n"
LACKS_A_MODULE = "import sys\nsys.modules['ctypes'] = None\n"
BREAKS = """
from elasticjob._runtime.agent.start_workers import command
def broken(*_):
    raise PermissionError(13, "Permission denied", "/app")
command.parse_command = broken
"""


@pytest.mark.parametrize(
    ("customized", "env", "message"),
    [
        ("", {Env.INDEX: "x"}, "ELASTICJOB_INDEX=x: want a whole number, 0 or more"),
        (OLD_PYTHON, {}, "use an image with Python 3.10 or newer"),
        (LACKS_A_MODULE, {}, "use an image with a complete Python"),
        (BREAKS, {}, "PermissionError: [Errno 13] Permission denied: '/app'"),
    ],
    ids=["wrong variable", "old Python", "incomplete Python", "unforeseen"],
)
def test_an_error_before_the_event_loop_is_a_usage_error_with_a_termination_message(
    customized: str, env: dict[str, str], message: str, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(customized)
    paths = os.pathsep.join([str(tmp_path), CODE_ROOT])
    done = run_agent(tmp_path / "termination", PYTHONPATH=paths, **env)
    assert done.returncode == 64, done.stderr
    termination = json.loads((tmp_path / "termination").read_text())
    assert (termination["outcome"], termination["reason"]) == ("Error", "UsageError")
    assert message in termination["message"]
    assert message in done.stderr


# ---- few open files ------------------------------------------------------------------------------------------------

SOFT_LIMIT, CONNECTIONS = 256, 400
FEW_OPEN_FILES = ["bash", "-c", f'ulimit -Sn {SOFT_LIMIT}; exec "$@"', "bash"]
CONNECTS_OFTEN = f"""
import os, resource, socket
from elasticjob._runtime.store import wire

soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
print("soft limit", soft, flush=True)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
hello = wire.request(wire.Op.VALIDATE, number=wire.MAGIC) + wire.request(wire.Op.PING, number=7)
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
connections = []
for _ in range({CONNECTIONS}):
    connections.append(socket.create_connection(address, 10))
    connections[-1].sendall(hello)
print("answers", sum(connection.recv(4) == wire.u32(7) for connection in connections), flush=True)
"""


@pytest.mark.parametrize("preload", [[], ["json"]], ids=["exec", "fork"])
def test_the_store_of_a_round_serves_more_connections_than_the_soft_limit_of_open_files(
    preload: list[str], tmp_path: Path
) -> None:
    job = manifest(script(tmp_path, CONNECTS_OFTEN), preload=preload)
    with LocalRun(job, tmp_path, within=FEW_OPEN_FILES) as run:
        run.wait_for(f"soft limit {SOFT_LIMIT}$")
        run.wait_for(f"answers {CONNECTIONS}$")
        assert run.exit_code() == 0, run.text


HOSTS_A_LARGE_ROUND = f"""{OWN_COORDINATOR}
import sys
from elasticjob._runtime.agent.main import main

async def coordinate(send):
    send(messages.StartRound(RoundId(1, 0, 1), 0, 2500, 0, 20000, 0, 20000, "127.0.0.1", 1, 0, 3))

admit_workers = runner.admit_workers

def admit(store, start, open_files):
    admit_workers(store, start, open_files)
    print("limit", store.limits.connections, flush=True)
    raise RuntimeError("seen enough")

runner.admit_workers = admit
sys.exit(main(["true"]))
"""


def test_the_connection_limit_of_a_rounds_store_follows_the_size_of_the_round(tmp_path: Path) -> None:
    large = [sys.executable, "-c", HOSTS_A_LARGE_ROUND]
    done = run_agent(tmp_path / "termination", argv=large)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert f"limit {connection_limit(20_000, 2500, hard)}\n" in done.stdout, done.stderr
    few = ["bash", "-c", 'ulimit -n 4096; exec "$@"', "bash"]
    done = run_agent(tmp_path / "termination", argv=[*few, *large])
    assert "limit 3840\n" in done.stdout, done.stderr
    assert "gets 22500 connections or more, but the limit of open files allows only 3840:" in done.stderr
