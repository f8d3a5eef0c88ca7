"""The fork server: imports the modules that training scripts import, once, and forks workers that run the script.

It runs under the interpreter of the user's command, which may differ from the agent's, and never touches a GPU.
Its control socket is one end of a SOCK_SEQPACKET pair; the agent has the other. After the imports, the self-test and
the first forks the fork server sends one of

    {"ready": true, "libuv": true, "seconds": 2.5, "missing": ["module: reason"]}
    {"ready": false, "reason": "...", "seconds": 2.5, "missing": []}

`libuv`: whether torch has it, null if torch is not preloaded. Then the agent sends requests, each with the descriptors
of all its workers:

    {"workers": [{"env": {"NAME": "value", ...}, "descriptors": [1, 2]}, ...]}

`env`: variables to add, or the whole environment of a torchrun. `descriptors`: the number that each descriptor gets
in the worker. A worker whose arguments differ from the others' has `"command": {...}`, the fields of
`run_main.Program`. A worker that takes the place of another process also has `"caller": {...}`, the fields of
`run_main.CallerProcess`; if the fork server has no command of its own, every worker has it. The fork server answers
`{"pids": [...], "mutexes": [...]}` once the workers are children of the agent and hold the mutexes with these
numbers in the memory that the agent shares with them (`robust_mutex`); null: there was none left.

The fork server ends when the agent closes the socket. `preload_learning` explains how the fork server may preload
what the first workers import.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import select
import socket
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NamedTuple

from elasticjob._runtime.agent.processes import die_with_parent
from elasticjob._runtime.agent.start_workers.fork_server import own_torchrun, run_main, self_test
from elasticjob._runtime.agent.start_workers.fork_server.early_variables import PreloadRecord, recorded_reads
from elasticjob._runtime.agent.start_workers.fork_server.inherited_state import set_process_title
from elasticjob._runtime.agent.start_workers.fork_server.own_modules import import_own_modules
from elasticjob._runtime.agent.start_workers.fork_server.preload_learning import (
    Baseline,
    ImportReport,
    PreloadLearning,
    report_imports_at_first_step,
)
from elasticjob._runtime.agent.start_workers.fork_server.preload_trial import import_reported
from elasticjob._runtime.agent.start_workers.fork_server.torch_backends import find_backends
from elasticjob._runtime.agent.start_workers.in_workers import sitecustomize
from elasticjob._runtime.system.robust_mutex import MutexMemory, open_mutex_memory

MAX_DESCRIPTORS = 250
"""Of one message; the kernel's limit is 253."""
PREFORK_DELAY = 2.0
"""Seconds without a request after which workers are forked ahead of need."""


class ForkRequest(NamedTuple):
    """What a pre-forked process needs to become a worker."""

    env: dict[str, str]
    descriptors: list[int]
    """Numbers for the descriptors that come with the request, in order."""
    command: dict[str, Any] | None = None
    """Fields of `run_main.Program`; None: the fork server's own command."""
    caller: dict[str, Any] | None = None
    """Fields of `run_main.CallerProcess`; None: run the fork server's own command."""
    channel: int | None = None
    """Number for one more descriptor, on which the worker may report its imports; None: it does not report."""


def main() -> None:
    """Run the fork server. In each fork this returns after the user's program.

    Arguments: the folder of the agent's code (removed from sys.path), the descriptor of the control socket, and the
    configuration as JSON.
    """
    code_root, descriptor, raw = sys.argv[1:4]
    sys.path.remove(code_root)
    _unload_elasticjob()
    config = json.loads(raw)
    command = config["command"] and run_main.Program(**config["command"])
    if command:
        run_main.prepare_path(command)
    elif not run_main.is_safe_path():
        del sys.path[0]  # the empty string of `-c`
    set_process_title(["elasticjob-fork-server"])
    control = socket.socket(fileno=int(descriptor))
    mutexes = open_mutex_memory(config["mutexes"])
    started = time.monotonic()
    record = PreloadRecord(set())
    with self_test.import_environment(), self_test.no_garbage_collections(), recorded_reads(record.read):
        missing = self_test.import_modules(config["preload"])
        import_own_modules(code_root)
        sitecustomize.load()
        find_backends()
        result = self_test.check_threads() or self_test.check_gpus() or self_test.run_self_test()
    result |= {"seconds": round(time.monotonic() - started, 3), "missing": missing}
    baseline = Baseline(frozenset(sys.modules), dict(os.environ))
    _freeze_memory(record)
    answer = json.dumps(result).encode()
    if not result["ready"]:
        control.send(answer)
        return
    learning = PreloadLearning(baseline)
    counts = config["preforked_workers"], config["workers_per_fork"]
    request = _serve(control, os.getppid(), *counts, learning, mutexes, answer, record)
    if request.caller is not None:
        if command and not run_main.is_safe_path():
            del sys.path[0]
        command = run_main.take_place_of(run_main.CallerProcess(**request.caller))
    elif request.command is not None:
        command = run_main.Program(**request.command)
    elif own_torchrun.runs_torchrun(command):
        # The request has the whole environment: torchrun's workers must not get variables that the imports set here.
        os.environ.clear()
    os.environ.update(request.env)
    if request.channel is not None:
        report_imports_at_first_step(request.channel, baseline)
    if own_torchrun.runs_torchrun(command):
        own_torchrun.run_torchrun(command)
    preloaded = frozenset(name.partition(".")[0] for name in config["preload"])
    run_main.run_program(command, record, preloaded)


def _freeze_memory(record: PreloadRecord) -> None:
    record.note_modules()
    gc.collect()
    gc.freeze()  # a collection in a worker must not copy the pages that it shares with the fork server


def _unload_elasticjob() -> None:
    """Remove this package from sys.modules: the user's code may have its own `elasticjob`."""
    for name in [n for n in sys.modules if n.split(".")[0] == "elasticjob"]:
        del sys.modules[name]


# ---- pre-forked workers --------------------------------------------------------------------------------------------


class PreforkedWorkers(NamedTuple):
    """A group of processes forked ahead of need. Each waits on its socket for a `ForkRequest`.

    They are children of the agent (a child subreaper), which gets their exit status. They are in the session of the
    fork server, by which the agent distinguishes them from workers.
    """

    pids: list[int]
    sockets: list[socket.socket]
    mutexes: list[int | None]
    """Numbers of the mutexes that they hold."""

    def start(self, workers: list[dict[str, Any]], descriptors: list[int], *, report: bool) -> socket.socket | None:
        """Make the first processes workers; the others end. `workers`: fields of `ForkRequest`, one for each worker.

        `descriptors`: those of all workers. `report`: the first worker may report its imports; this returns the socket
        for the report.
        """
        report_socket = self.sockets[0] if report else None
        for unused in self.sockets[len(workers) :]:
            unused.close()
        for control, worker in zip(self.sockets, workers, strict=False):
            numbers = worker["descriptors"]
            channel = max([2, *numbers]) + 1 if control is report_socket else None
            request = json.dumps({**worker, "channel": channel}).encode()
            with suppress(BrokenPipeError):  # it was killed just now: the agent gets its exit status
                socket.send_fds(control, [request], descriptors[: len(numbers)])
            descriptors = descriptors[len(numbers) :]
            if control is not report_socket:
                control.close()
        return report_socket

    def has_lost_one(self, readable: Iterable[socket.socket]) -> bool:
        """Return whether one of the processes was killed.

        One that waits for a request sends nothing, so its socket is readable only if the process is gone.
        """
        return not set(self.sockets).isdisjoint(readable)

    def discard(self) -> None:
        """Close this process's sockets. The workers end once no process has their sockets open."""
        for control in self.sockets:
            control.close()


def _serve(
    control: socket.socket,
    agent: int,
    preforked_workers: int,
    workers_per_fork: int,
    learning: PreloadLearning,
    mutexes: MutexMemory | None,
    readiness: bytes,
    record: PreloadRecord,
) -> ForkRequest:
    """Send the message `readiness`, and answer requests until the agent closes the socket.

    Returns in forks only, with the request of each. Keeps `preforked_workers` processes ready, in groups of
    `workers_per_fork`; a request takes one group. `record`: what the fork server has imported.
    """
    first = _prefork(workers_per_fork, agent, [control], [], mutexes)
    if isinstance(first, ForkRequest):
        return first
    groups = [first]
    # Sent only now: a running job that this agent joins ends its round at this message, and waits for the workers here.
    control.send(readiness)
    while True:
        # No prefork right after a request: the workers that start need the processors.
        timeout = PREFORK_DELAY if len(groups) < preforked_workers // workers_per_fork else None
        waiting = [each for group in groups for each in group.sockets]
        readable = select.select([control, *learning.sockets, *waiting], [], [], timeout)[0]
        for group in filter(lambda group: group.has_lost_one(readable), tuple(groups)):
            group.discard()
            groups.remove(group)
        for ready in readable:
            if learning.candidate_ready(ready):
                for group in groups:
                    group.discard()
                learning.promote_candidate()
            if (report := learning.receive(ready)) and (result := learning.fork_candidate()):
                # This is the candidate. Once promoted it goes on in this loop; an empty `readable` makes it prefork.
                for group in groups:
                    group.discard()
                _become_fork_server(result, report, learning.baseline, record)
                groups, readable = [], []
                break
        request = socket.recv_fds(control, 1 << 20, MAX_DESCRIPTORS) if control in readable else None
        if request is not None and not request[0]:
            os._exit(0)
        if not readable or (request is not None and not groups):
            forked = _prefork(workers_per_fork, agent, [control, *learning.sockets], groups, mutexes)
            if isinstance(forked, ForkRequest):
                return forked
            groups.append(forked)
        if request is not None:
            _answer(control, groups.pop(), request[0], request[1], learning)


def _answer(
    control: socket.socket, group: PreforkedWorkers, request: bytes, descriptors: list[int], learning: PreloadLearning
) -> None:
    """Make processes of the group the workers of this request, and send their pids and mutexes to the agent."""
    workers = json.loads(request)["workers"]
    channel = group.start(workers, descriptors, report=learning.wants_reports)
    if channel is not None:
        learning.listen(channel)
    for descriptor in descriptors:
        os.close(descriptor)
    count = len(workers)
    control.send(json.dumps({"pids": group.pids[:count], "mutexes": group.mutexes[:count]}).encode())


def _become_fork_server(result: socket.socket, report: ImportReport, baseline: Baseline, record: PreloadRecord) -> None:
    """In the candidate: import the reported modules and return as the fork server, or end if it is not promoted."""
    die_with_parent()
    try:
        outcome = import_reported(report, baseline, record.read)
        _freeze_memory(record)
    except BaseException as error:
        outcome = {"ready": False, "reason": f"{type(error).__name__}: {error}"[:1000]}
    result.send(json.dumps(outcome).encode())
    if not outcome["ready"] or not result.recv(1):
        os._exit(0)
    result.close()


def _prefork(
    count: int,
    agent: int,
    own_sockets: list[socket.socket],
    others: list[PreforkedWorkers],
    mutexes: MutexMemory | None,
) -> PreforkedWorkers | ForkRequest:
    """Fork a group of `count` processes. In each of them this returns its request, once it is a worker.

    The processes close `own_sockets` and the sockets of the other groups. An intermediate process forks them and ends
    before this returns: thus they are children of the agent before they become workers.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(count)]
    numbers: list[int | None] = mutexes.reserve(count) if mutexes else [None] * count
    pids_read, pids_write = os.pipe()
    intermediate = os.fork()
    if intermediate == 0:
        for control in own_sockets:
            control.close()
        for group in others:
            group.discard()
        os.close(pids_read)
        for ours, _ in pairs:
            ours.close()
        control, mutex = _fork_group([theirs for _, theirs in pairs], numbers, pids_write)
        if mutexes is not None and mutex is not None:
            mutexes.try_hold(mutex)
        os.close(pids_write)
        return _await_request(control, agent)
    os.close(pids_write)
    for _, theirs in pairs:
        theirs.close()
    with os.fdopen(pids_read, "rb") as file:
        pids: list[int] = json.loads(file.read())  # complete once all forks have closed the pipe
    os.waitpid(intermediate, 0)
    return PreforkedWorkers(pids, [ours for ours, _ in pairs], numbers)


def _fork_group(
    sockets: list[socket.socket], mutexes: list[int | None], pids_write: int
) -> tuple[socket.socket, int | None]:
    """In the intermediate process: fork, write the process ids as JSON, and end.

    Returns in the forks, with the socket and the mutex of each.
    """
    pids = []
    for control, mutex in zip(sockets, mutexes, strict=True):
        pid = os.fork()
        if pid == 0:
            for other in sockets:
                if other is not control:
                    other.close()
            return control, mutex
        pids.append(pid)
    os.write(pids_write, json.dumps(pids).encode())
    os._exit(0)


def _await_request(control: socket.socket, agent: int) -> ForkRequest:
    """In a pre-forked process: wait for the request, then become a worker with its own session and output.

    The worker ends with the agent.
    """
    run_main.prepare_fork()
    data, descriptors, _, _ = socket.recv_fds(control, 1 << 20, MAX_DESCRIPTORS)
    if not data:
        os._exit(0)
    request = ForkRequest(**json.loads(data))
    os.setsid()
    die_with_parent()
    if os.getppid() != agent:
        os._exit(1)
    if request.channel is None:
        control.close()
        _move_descriptors(descriptors, request.descriptors)
    else:
        _move_descriptors([*descriptors, control.detach()], [*request.descriptors, request.channel])
        os.set_inheritable(request.channel, False)
    if request.caller is not None:
        for closed in {0, 1, 2}.difference(request.descriptors):
            os.close(closed)
    return request


def _move_descriptors(descriptors: list[int], numbers: list[int]) -> None:
    """Give the descriptors these numbers. The two lists may overlap: the moves go through unused numbers above both."""
    above = max([*descriptors, *numbers]) + 1
    for descriptor in descriptors:
        fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, above)
        os.close(descriptor)
    for moved, number in enumerate(numbers, above):
        os.dup2(moved, number)
        os.close(moved)
