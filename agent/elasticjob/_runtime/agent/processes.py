"""Processes of this pod: reap children as PID 1 must, and find and signal the descendants of a worker (Linux)."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import struct
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from elasticjob._runtime.contract.commands.python_command import is_python
from elasticjob._runtime.contract.names import Env

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_FLAGS, _THREADS, _START_TIME, _EXIT_CODE = 6, 17, 19, 49
"""Indices in the result of `_stat`: the kernel's flags, the number of threads, the time of the start in ticks since the
boot, and the status that waitpid will return."""
_PF_EXITING = 4
"""The flag of a thread that the kernel is ending: it runs neither code of its program nor system calls any more."""
MAX_OOM_SCORE = 1000
"""The oom_score_adj of a process that the kernel kills before all others (proc(5))."""
_libc = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    """Adopt orphaned descendants as children, as PID 1 does."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def die_with_parent() -> None:
    """Ask the kernel to SIGKILL this process when its parent ends. Safe between fork and exec."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def child_setup(open_files: tuple[int, int]) -> Callable[[], None]:
    """Return what a child runs between fork and exec. It calls `die_with_parent` and restores the limit of open files.

    `open_files`: the limits (soft, hard) before the agent raised its own for its store. With a high limit, the user's
    program might be slow, or break in `select`.
    """

    def set_up() -> None:
        die_with_parent()
        resource.setrlimit(resource.RLIMIT_NOFILE, open_files)

    return set_up


def peer_pid(peer: socket.socket) -> int:
    """Return the process at the other end of a Unix socket (SO_PEERCRED)."""
    pid: int = struct.unpack("iII", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    return pid


def reap() -> list[tuple[int, int]]:
    """Reap all children that have ended; return (pid, exit code), negative for a signal as in `subprocess`."""
    ended = []
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended.append((pid, os.waitstatus_to_exitcode(status)))
    return ended


def signal_group(leader: int, number: signal.Signals) -> None:
    """Signal a process group. If the leader has no group of its own yet, signal only the leader.

    The leader must be a child that has not been reaped. A fork of the fork server is a child of the agent for a moment
    before it leads its group. A signal other than SIGKILL does not go to the helpers of a program that handles it, such
    as the workers of a data loader and a process that writes its log: the program may need them until it has saved.
    """
    if number is not signal.SIGKILL:
        group = _group(leader)
        if helpers := _helpers_in(group, number):
            for pid in group - helpers:
                signal_one(pid, number)
            return
    try:
        os.killpg(leader, number)
    except ProcessLookupError:
        signal_one(leader, number)
    except PermissionError:
        pass


def _group(leader: int) -> set[int]:
    """Return the processes of a group: the leader, those below it, and those whose parent in the group has ended."""
    roots = {leader, *filter(lambda pid: _is_in(leader, pid), _children(os.getpid()))}
    below = set().union(*(descendants(root) for root in roots))
    return {pid for pid in roots | below if _is_in(leader, pid)}


def _is_in(leader: int, pid: int) -> bool:
    try:
        return os.getpgid(pid) == leader
    except ProcessLookupError:
        return False


def _helpers_in(group: set[int], number: signal.Signals) -> set[int]:
    """Return the processes of a group that a Python program has started which handles the signal.

    Of other programs, these are their forks and the processes of multiprocessing. Other children get the signal: a
    shell that has a trap may wait for them.
    """
    helpers = set()
    for parent in group:
        if not has_signal(parent, number, "SigCgt"):
            continue
        if _runs_python(parent):
            helpers |= group & descendants(parent)
            continue
        command = read_command_line(parent)
        for child in _children(parent):
            own = read_command_line(child)
            if own == command or any(word.startswith(b"from multiprocessing.") for word in own):
                helpers.add(child)
    return helpers


def _runs_python(pid: int) -> bool:
    try:
        return is_python(os.readlink(f"/proc/{pid}/exe"))  # noqa: PTH115
    except OSError:
        return False


def has_signal(pid: int, number: int, *fields: str) -> bool:
    """Return whether a signal is in one of these masks of a process's main thread, such as SigCgt: it has a handler."""
    try:
        return is_in_masks(Path(f"/proc/{pid}/status").read_text(errors="replace"), number, *fields)
    except OSError:
        return False


def is_in_masks(status: str, number: int, *fields: str) -> bool:
    """Return whether a signal is in one of these masks of a /proc/PID/status. Some kernels, as gVisor's, lack some."""
    texts = (status.partition(f"\n{field}:")[2].split() for field in fields)
    return any(int(text[0], 16) >> (number - 1) & 1 for text in texts if text)


def descendants(root: int, *, without: Iterable[int] = ()) -> set[int]:
    """Return the live processes below `root`, except the processes in `without` and their descendants.

    Processes of `kubectl exec` that have lost their parent become children of the agent. They do not count.
    """
    excluded, found, todo = set(without), set[int](), [root]
    if root == os.getpid():
        excluded |= {pid for pid in _children(root) if _entered_container(pid)}
    while todo:
        for child in _children(todo.pop()):
            if child not in excluded and child not in found:
                found.add(child)
                todo.append(child)
    return {pid for pid in found if not _ended(_stat(pid))}


def exit_of(pid: int) -> int | None:
    """Return the exit code (as `reap` does) of a child whose threads have all begun to end; None if one has not.

    Nothing of its program runs any more, and the kernel frees what it holds. The code is 0 if /proc does not show it,
    for instance because the process belongs to another user.
    """
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            stat = _stat(f"{pid}/task/{task.name}")
            if stat and not int(stat[_FLAGS]) & _PF_EXITING:
                return None
    fields = _stat(pid)
    return os.waitstatus_to_exitcode(int(fields[_EXIT_CODE])) if fields else 0


def has_ended(pid: int) -> bool:
    """Return whether a child holds nothing any more: it has been reaped, or only needs to be reaped."""
    return _ended(_stat(pid))


def start_time(pid: int) -> str:
    """Return when a process was started, which a later process of the same id does not share; "" if it has ended."""
    stat = _stat(pid)
    return stat[_START_TIME] if stat else ""


def is_stopped(pid: int) -> bool:
    """Return whether a process was stopped by a signal, such as SIGSTOP, and runs no code until SIGCONT."""
    stat = _stat(pid)
    return bool(stat) and stat[0] == "T"


def cleaners(pids: Iterable[int]) -> tuple[set[int], set[int]]:
    """Return (the cleaners among the processes, those that may become cleaners).

    A cleaner removes what other processes leave in shared memory once these have ended. While the kernel loads the
    program of a new process, /proc does not show yet whether that will be a cleaner.
    """
    commands = {pid: read_command_line(pid) for pid in pids}
    known = {pid for pid, command in commands.items() if _is_cleaner(command)}
    return known, {pid for pid, command in commands.items() if _is_loading(pid, command)}


def outside_session(pids: Iterable[int], leader: int) -> set[int]:
    """Return the processes that are in another session than the leader's, except those that have been reaped."""
    return {pid for pid in pids if (stat := _stat(pid)) and stat[3] != str(leader)}


def kill(pids: Iterable[int]) -> None:
    """Send SIGKILL to each process that still exists."""
    for pid in pids:
        signal_one(pid, signal.SIGKILL)


def kill_with_children(pid: int) -> None:
    """Send SIGKILL to a process and all that it has started, except `cleaners`, which end by themselves after it.

    A process that only looked like a cleaner runs until the workers are stopped.
    """
    signal_one(pid, signal.SIGSTOP)  # it must start no more processes: without it, they would be children of the agent
    below = descendants(pid)
    kill({pid, *below}.difference(*cleaners(below)))


def oom_score() -> int:
    """Return this process's oom_score_adj, which its children inherit; 0 if unknown."""
    try:
        return int(Path("/proc/self/oom_score_adj").read_text())
    except (OSError, ValueError):
        return 0


def set_oom_score(pid: int, score: int) -> None:
    """Set how early the kernel kills a process when memory runs out, from 0 (as most) to MAX_OOM_SCORE (first).

    Without the permission this does nothing.
    """
    with suppress(OSError):
        Path(f"/proc/{pid}/oom_score_adj").write_text(str(score))


def signal_one(pid: int, number: signal.Signals) -> None:
    """Signal a process, unless it has ended."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def open_files(process: Path) -> dict[str, str]:
    """Return the paths of a process's open files by number; `process` is its folder in /proc. Empty if unreadable."""
    found: dict[str, str] = {}
    with suppress(OSError):
        for descriptor in (process / "fd").iterdir():
            with suppress(OSError):  # closed in the meantime, as the descriptor of the listing itself
                found[descriptor.name] = str(descriptor.readlink())
    return found


def _entered_container(pid: int) -> bool:
    """Return whether a process was started in the container from outside, by `kubectl exec`.

    Such a process has the container's own variables. The agent removes its key from the variables of workers.
    """
    try:
        return f"\0{Env.NODE_KEY}=".encode() in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):  # the thread has ended, and another one has its children now
                found += map(int, (task / "children").read_text().split())
    return found


def _ended(stat: list[str]) -> bool:
    """Return whether no thread runs. A first thread that has ended before the others already shows the state Z."""
    return not stat or stat[0] == "X" or (stat[0] == "Z" and int(stat[_THREADS]) <= 1)


def _is_cleaner(argv: list[bytes]) -> bool:
    """Return whether this is the command line of multiprocessing's or loky's resource tracker, or torch's manager."""
    return b"resource_tracker import main" in b"".join(argv[1:]) or argv[0].endswith(b"torch_shm_manager")


def _is_loading(pid: int, command: list[bytes]) -> bool:
    """Return whether a process is in execve: its old memory is gone, and its new arguments are not there yet.

    A process that ends has no command line either, and does not count.
    """
    stat = _stat(pid) if command == [b""] else []
    return bool(stat) and not _ended(stat) and not int(stat[_FLAGS]) & _PF_EXITING


def read_command_line(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return [b""]


def _stat(pid: int | str) -> list[str]:
    """Return the fields of /proc/PID/stat from the third (the state) on; empty when the process has ended.

    `PID/task/TID` names a thread.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
