"""A rank that waits for a silent peer or a lost store can be interrupted, except where gloo loses an operation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import elasticjob

pytestmark = pytest.mark.torch
pytest.importorskip("torch")
ROOT = str(Path(elasticjob.__file__).parents[1])

FORMS = """
import struct, threading
from datetime import timedelta
import torch.distributed as dist
from elasticjob.inprocess._threads.interruption import Interrupter, RankShouldRestart
from elasticjob.inprocess._groups.gloo_addresses import parse_address
from elasticjob.inprocess._groups.process_groups import ProcessGroups

LAST_PORT = 65535  # gloo lets the member with the highest address open the connection: this rank waits for it
TIMEOUT = timedelta(seconds=300)
published = threading.Event()

class StoreOfSilentPeer(dist.Store):
    '''Has the peer's address as soon as this rank has published its own.'''

    def __init__(self):
        super().__init__()
        self.values, self.changed = {}, threading.Condition()

    def set(self, key, value):
        value = value.encode() if isinstance(value, str) else bytes(value)
        with self.changed:
            self.values[key] = value
            address = parse_address(value)
            if address and key.endswith("/0"):
                own, peer = (struct.pack("!H", port) for port in (address[1], LAST_PORT))
                self.values[key[:-1] + "1"] = value.replace(own, peer)
                published.set()
            self.changed.notify_all()

    def get(self, key):
        self.wait([key])
        return self.values[key]

    def add(self, key, number):
        with self.changed:
            self.values[key] = str(int(self.values.get(key, b"0")) + number).encode()
            self.changed.notify_all()
            return int(self.values[key])

    def check(self, keys):
        return all(key in self.values for key in keys)

    def wait(self, keys, timeout=TIMEOUT):
        with self.changed:
            if not self.changed.wait_for(lambda: self.check(keys), timeout.total_seconds()):
                raise RuntimeError(f"no {keys}")

    def set_timeout(self, timeout):
        pass

    @property
    def timeout(self):
        return TIMEOUT

def interrupt():
    published.wait()
    interrupter.interrupt(groups.break_collectives)

groups, interrupter, store = ProcessGroups(), Interrupter(), StoreOfSilentPeer()
threading.Thread(target=interrupt, daemon=True).start()
try:
    with groups.watch(), interrupter.armed():
        dist.init_process_group("gloo", store=store, rank=0, world_size=2, timeout=TIMEOUT)
        dist.barrier()  # gloo may create the group with the connections that were made in place of the peer
except (RankShouldRestart, RuntimeError):  # the creation may fail before the exception is raised
    print("interrupted", interrupter.pending, flush=True)
groups.leave()
"""


CONNECTS = """
import os, socket, threading
from datetime import timedelta
import torch.distributed as dist
from elasticjob.inprocess._threads.interruption import Interrupter, RankShouldRestart
from elasticjob.inprocess._groups.process_groups import ProcessGroups

store = socket.create_server(("127.0.0.1", 0))
os.environ |= {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.getsockname()[1])}
groups, interrupter = ProcessGroups(), Interrupter()

def lose_store():
    connection, _ = store.accept()
    store.close()
    connection.close()
    interrupter.interrupt(groups.break_collectives)

threading.Thread(target=lose_store, daemon=True).start()
try:
    with groups.watch(), interrupter.armed():
        dist.init_process_group("gloo", timeout=timedelta(seconds=300))
except (RankShouldRestart, RuntimeError):
    print("interrupted", interrupter.pending, flush=True)
groups.leave()
"""


LEAVES = """
import os, time
import torch
import torch.distributed as dist
from elasticjob.inprocess._groups.process_groups import ProcessGroups

def held():
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

def round():
    with groups.watch():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        for group in (None, dist.new_group([0])):
            dist.all_reduce(torch.ones(1), group=group)
    groups.leave()
    assert not dist.is_initialized()

def wait(condition):
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return held()

groups = ProcessGroups()
before = held()[0]
round()
first = wait(lambda: held()[0] == before)
for _ in range(20):
    round()
print("the same", wait(lambda: held() == first) == first, flush=True)
"""


RECEIVES = """
import fcntl, os, signal, struct, sys, termios, threading, time
import torch
import torch.distributed as dist
from elasticjob.inprocess._groups import process_groups
from elasticjob.inprocess._groups.own_sockets import connections

rank, folder = int(sys.argv[1]), sys.argv[2]
groups = process_groups.ProcessGroups()

def bytes_to_send():
    return max(struct.unpack("i", fcntl.ioctl(s.fileno(), termios.TIOCOUTQ, bytes(4)))[0]
               for s in connections(groups.addresses))

def stop_while_sending():
    while bytes_to_send() < 1 << 16:
        pass
    print("sending", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)

def break_collectives():
    sys.stdin.readline()
    groups.break_collectives()
    while threading.main_thread().is_alive() and not groups.has_lost_operation():
        time.sleep(0.01)
    print("lost", flush=True)
    os._exit(0)

with groups.watch():
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    tensor = torch.ones(1 << 26)
    dist.barrier()
    threading.Thread(target=stop_while_sending if rank else break_collectives, daemon=True).start()
    print("receives" if rank == 0 else "waits", flush=True)
    if rank:
        sys.stdin.readline()
    try:
        dist.broadcast(tensor, 1)
    except RuntimeError:
        print("raised", groups.has_lost_operation(), flush=True)
"""

LIVES = """
import sys, threading
import torch
import torch.distributed as dist
from elasticjob.inprocess._groups import process_groups

rank, folder = int(sys.argv[1]), sys.argv[2]
groups = process_groups.ProcessGroups()

def look():
    sys.stdin.readline()
    groups.break_collectives()
    print(any(groups.has_lost_operation() for _ in range(10)), flush=True)

with groups.watch():
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    own = dist.ProcessGroupGloo(dist.PrefixStore("own", store), rank, 2)  # of which `groups` does not know
    if rank == 0:
        threading.Thread(target=look).start()
    print("ready", flush=True)
    if rank:
        sys.stdin.readline()
    own.broadcast(torch.ones(1), 1).wait()
"""


def tell(rank: subprocess.Popen[str]) -> None:
    assert rank.stdin is not None
    rank.stdin.write("\n")
    rank.stdin.flush()


def says(rank: subprocess.Popen[str]) -> str:
    assert rank.stdout is not None
    return rank.stdout.readline()


@pytest.mark.parametrize("sends", [True, False], ids=["in the middle", "before the first byte"])
def test_an_operation_that_gloo_loses_is_distinguished_from_one_that_it_ends(sends: bool, tmp_path: Path) -> None:
    """A peer that stops while its data arrives; one that stops before is the ordinary case."""
    (tmp_path / "receives.py").write_text(RECEIVES)
    env = {**os.environ, "PYTHONPATH": ROOT}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    argv = [sys.executable, "receives.py"]
    ranks = [subprocess.Popen([*argv, str(r), str(tmp_path)], cwd=tmp_path, env=env, **pipes) for r in range(2)]
    receiver, sender = ranks

    try:
        assert (says(receiver), says(sender)) == ("receives\n", "waits\n")
        if sends:
            tell(sender)
            assert says(sender) == "sending\n"
        tell(receiver)
        assert says(receiver) == ("lost\n" if sends else "raised False\n")
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def test_a_wait_for_a_live_peer_is_no_lost_operation(tmp_path: Path) -> None:
    """All connections of the groups that are known are closed, but the script has made another group itself."""
    (tmp_path / "lives.py").write_text(LIVES)
    env = {**os.environ, "PYTHONPATH": ROOT}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    argv = [sys.executable, "lives.py"]
    ranks = [subprocess.Popen([*argv, str(r), str(tmp_path)], cwd=tmp_path, env=env, **pipes) for r in range(2)]
    try:
        assert [says(rank) for rank in ranks] == ["ready\n"] * 2
        tell(ranks[0])
        assert says(ranks[0]) == "False\n"
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def test_groups_that_are_left_leave_no_threads_and_no_files(tmp_path: Path) -> None:
    """Their threads end a moment later, while the next groups are created."""
    (tmp_path / "leaves.py").write_text(LEAVES)
    env = {**os.environ, "PYTHONPATH": ROOT}
    done = subprocess.run([sys.executable, "leaves.py"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout == "the same True\n", done.stderr


ENDS = """
import os, sys
import torch
import torch.distributed as dist
from elasticjob.inprocess._groups.process_groups import ProcessGroups

processes = []
for _ in range(8):
    if (pid := os.fork()) == 0:
        groups = ProcessGroups()
        with groups.watch():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            dist.all_reduce(torch.ones(1))
        groups.leave()
        sys.exit(7)
    processes.append(pid)
print([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in processes], flush=True)
"""


def test_a_process_may_end_right_after_it_has_left_its_groups(tmp_path: Path) -> None:
    """Their threads still end then: without a wait, about every second process ended by SIGABRT."""
    (tmp_path / "ends.py").write_text(ENDS)
    env = {**os.environ, "PYTHONPATH": ROOT}
    done = subprocess.run([sys.executable, "ends.py"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout == f"{[7] * 8}\n", done.stderr


@pytest.mark.parametrize("program", [FORMS, CONNECTS], ids=["silent peer", "lost store"])
def test_a_wait_for_a_connection_that_never_comes(program: str, tmp_path: Path) -> None:
    """The peer was stopped or cut off between its entry in the store and its connection; the store's node is lost."""
    (tmp_path / "forms.py").write_text(program)
    env = {**os.environ, "PYTHONPATH": ROOT}
    done = subprocess.run([sys.executable, "forms.py"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout == "interrupted True\n", done.stderr
