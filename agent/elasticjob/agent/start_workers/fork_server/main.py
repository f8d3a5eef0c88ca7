"""The warm process: imports what training scripts import, once, and forks workers that run the user's command.

It runs under the interpreter of the user's command, which may be another than the agent's, and never touches a GPU.
The control socket is a SOCK_SEQPACKET pair with the agent. The agent sends, with the descriptors of all workers:

    {"workers": [{"env": {"NAME": "value", ...}, "descriptors": [1, 2]}, ...]}

(environment to add, for a torchrun all of it; and which descriptor each becomes). A worker that stands for another
process is told its command, too (`run_main.Place`): `"place": {...}`; without a command of this process, each is.

and gets `{"pids": [...]}` once the workers are its own children. Before that, once, after the imports:

    {"ready": true, "libuv": true, "seconds": 2.5, "missing": ["module: why"]}    or {"ready": false, "why": "..."}

(`libuv`: whether torch has it, null where torch is not preloaded.)

Its end of file ends this process. What the first workers import, this process may learn: see `learning`.
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
from typing import Any, NamedTuple

from elasticjob.agent.start_workers.fork_server import own_torchrun, run_main, self_test
from elasticjob.agent.start_workers.fork_server.candidate import import_reported
from elasticjob.agent.start_workers.fork_server.preload_learning import (
    Baseline,
    ImportReport,
    PreloadLearning,
    report_imports_at_first_step,
)

MAX_DESCRIPTORS = 250
"""Of one message; the kernel's limit is 253."""
PREFORK_DELAY = 2.0
"""Seconds of quiet before workers are forked ahead of need."""


class ForkRequest(NamedTuple):
    """What a fork needs to become a worker."""

    env: dict[str, str]
    descriptors: list[int]
    """What those that come with it become."""
    caller: dict[str, Any] | None = None
    """Fields of `run_main.Place`."""
    channel: int | None = None
    """Descriptor: where it may tell what it has imported."""


def main() -> None:
    """Arguments: the agent's code (to be taken off sys.path), descriptor of the socket, JSON of the configuration."""
    code_root, descriptor, raw = sys.argv[1:4]
    sys.path.remove(code_root)
    _forget_ourselves()
    config = json.loads(raw)
    command = config["command"] and run_main.Program(**config["command"])
    if command:
        run_main.prepare_path(command)
    elif not run_main.keeps_path():
        del sys.path[0]  # the empty string of `-c`
    run_main.show_command(["elasticjob-warm"])
    control = socket.socket(fileno=int(descriptor))
    started = time.monotonic()
    with self_test.import_environment():
        missing = self_test.import_modules(config["preload"])
        verdict = self_test.check_threads() or self_test.run_self_test()
    verdict |= {"seconds": round(time.monotonic() - started, 3), "missing": missing}
    birth = Baseline(frozenset(sys.modules), dict(os.environ))
    _settle()
    control.send(json.dumps(verdict).encode())
    if not verdict["ready"]:
        return
    worker = _serve(control, os.getppid(), config["reserve"], config["at_once"], PreloadLearning(birth))
    if worker.caller is not None:
        if command and not run_main.keeps_path():
            del sys.path[0]
        command = run_main.take_place_of(run_main.CallerProcess(**worker.caller))
    elif own_torchrun.runs_torchrun(command):
        os.environ.clear()  # it is told all of its own: its workers must not get what imports here have set
    os.environ.update(worker.env)
    if worker.channel is not None:
        report_imports_at_first_step(worker.channel, birth)
    if own_torchrun.runs_torchrun(command):
        own_torchrun.run_torchrun(command)
    run_main.run_program(command)


def _settle() -> None:
    gc.collect()
    gc.freeze()  # a collection in a worker must not copy the pages it shares


def _forget_ourselves() -> None:
    """The user's code may have its own `elasticjob`."""
    for name in [n for n in sys.modules if n.split(".")[0] == "elasticjob"]:
        del sys.modules[name]


# ---- workers in reserve --------------------------------------------------------------------------------------------


class PreforkedWorkers(NamedTuple):
    """Processes forked ahead of need, each waiting on its socket for what makes it a worker.

    They are children of the agent (a child subreaper), which gets their exit status, and in the session of this
    process, by which the agent tells them from workers.
    """

    pids: list[int]
    sockets: list[socket.socket]

    def release(self, workers: list[dict[str, Any]], descriptors: list[int], *, tell: bool) -> socket.socket | None:
        """Let them go as workers of the agent (fields of `Worker`, and the descriptors of all).

        `tell`: one of them may tell what it has imported, into the socket that this returns.
        """
        kept = self.sockets[0] if tell else None
        for control, worker in zip(self.sockets, workers, strict=True):
            numbers = worker["descriptors"]
            channel = max([2, *numbers]) + 1 if control is kept else None
            told = json.dumps({**worker, "channel": channel}).encode()
            socket.send_fds(control, [told], descriptors[: len(numbers)])
            descriptors = descriptors[len(numbers) :]
            if control is not kept:
                control.close()
        return kept

    def discard(self) -> None:
        """They are not needed, or not this process's to release: who holds no socket of theirs any more has no say."""
        for control in self.sockets:
            control.close()


def _serve(control: socket.socket, agent: int, count: int, size: int, learning: PreloadLearning) -> ForkRequest:
    """Keep `count` processes in reserve, released `size` at a time as asked, for ever. Returns in a worker only."""
    reserves: list[PreforkedWorkers] = []
    while True:
        # Not while the workers just released start: they want the processors.
        patience = PREFORK_DELAY if len(reserves) < count // size else None
        heard = select.select([control, *learning.sockets], [], [], patience)[0]
        for said in heard:
            if learning.candidate_ready(said):
                for reserve in reserves:
                    reserve.discard()
                learning.promote_candidate()
            if (report := learning.receive(said)) and (answer := learning.fork_candidate()):
                for reserve in reserves:
                    reserve.discard()
                _succeed(answer, report, learning.baseline)
                reserves, heard = [], []
                break
        request = socket.recv_fds(control, 1 << 20, MAX_DESCRIPTORS) if control in heard else None
        if request is not None and not request[0]:
            os._exit(0)
        if not heard or (request is not None and not reserves):
            mustered = _muster(size, agent, [control, *learning.sockets], reserves)
            if isinstance(mustered, ForkRequest):
                return mustered
            reserves.append(mustered)
        if request is not None:
            reserve = reserves.pop()
            tells = reserve.release(json.loads(request[0])["workers"], request[1], tell=learning.wants_reports)
            if tells is not None:
                learning.listen(tells)
            for descriptor in request[1]:
                os.close(descriptor)
            control.send(json.dumps({"pids": reserve.pids}).encode())


def _succeed(answer: socket.socket, report: ImportReport, birth: Baseline) -> None:
    """In the student: learn, then be the warm process. Ends where that is not to be."""
    run_main.die_with_parent()
    try:
        verdict = import_reported(report, birth)
        _settle()
    except BaseException as error:
        verdict = {"ready": False, "why": f"{type(error).__name__}: {error}"[:1000]}
    answer.send(json.dumps(verdict).encode())
    if not verdict["ready"] or not answer.recv(1):
        os._exit(0)
    answer.close()


def _muster(
    count: int, agent: int, ours_alone: list[socket.socket], others: list[PreforkedWorkers]
) -> PreforkedWorkers | ForkRequest:
    """Fork a reserve. In each of its processes this returns a `Worker`, once released.

    What `ours_alone` and the other reserves have open stays in this process. They are forked by a process that ends
    here and now: so they are the agent's before they are workers, and nothing is left to end when they are wanted.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(count)]
    answers, answer = os.pipe()
    between = os.fork()
    if between == 0:
        for held in ours_alone:
            held.close()
        for reserve in others:
            reserve.discard()
        os.close(answers)
        for ours, _ in pairs:
            ours.close()
        return _fork_reserve([theirs for _, theirs in pairs], agent, answer)
    os.close(answer)
    for _, theirs in pairs:
        theirs.close()
    with os.fdopen(answers, "rb") as told:
        pids: list[int] = json.loads(told.read())
    os.waitpid(between, 0)
    return PreforkedWorkers(pids, [ours for ours, _ in pairs])


def _fork_reserve(waiting: list[socket.socket], agent: int, answer: int) -> ForkRequest:
    pids = []
    for control in waiting:
        pid = os.fork()
        if pid == 0:
            os.close(answer)
            for other in waiting:
                if other is not control:
                    other.close()
            return _await_release(control, agent)
        pids.append(pid)
    os.write(answer, json.dumps(pids).encode())
    os._exit(0)


def _await_release(control: socket.socket, agent: int) -> ForkRequest:
    """In a process of the reserve: become a worker with its own session and output, that ends with the agent."""
    run_main.prepare_fork()
    data, descriptors, _, _ = socket.recv_fds(control, 1 << 20, MAX_DESCRIPTORS)
    if not data:
        os._exit(0)
    worker = ForkRequest(**json.loads(data))
    os.setsid()
    run_main.die_with_parent()
    if os.getppid() != agent:
        os._exit(1)
    if worker.channel is None:
        control.close()
        _place(descriptors, worker.descriptors)
    else:
        _place([*descriptors, control.detach()], [*worker.descriptors, worker.channel])
        os.set_inheritable(worker.channel, False)
    if worker.caller is not None:
        for closed in {0, 1, 2}.difference(worker.descriptors):
            os.close(closed)
    return worker


def _place(descriptors: list[int], numbers: list[int]) -> None:
    """Give descriptors these numbers, whichever they have."""
    above = max([*descriptors, *numbers]) + 1
    for descriptor in descriptors:
        fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, above)
        os.close(descriptor)
    for moved, number in enumerate(numbers, above):
        os.dup2(moved, number)
        os.close(moved)
