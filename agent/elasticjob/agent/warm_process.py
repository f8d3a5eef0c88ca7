"""The warm process: imports what training scripts import, once, and forks workers that run the user's command.

It runs under the interpreter of the user's command, which may be another than the agent's, and never touches a GPU.
The control socket is a SOCK_SEQPACKET pair with the agent. The agent sends, with the descriptors of all workers:

    {"workers": [{"env": {"NAME": "value", ...}, "descriptors": [1, 2]}, ...]}

(environment to add, and which descriptor each becomes). Without a command of its own, this process is told one with
each worker, which stands for another process then (`run_main.Place`): `"place": {...}`.

and gets `{"pids": [...]}` once the workers are its own children. Before that, once, after the imports:

    {"ready": true, "libuv": true, "seconds": 2.5, "missing": ["module: why"]}    or {"ready": false, "why": "..."}

(`libuv`: whether torch has it, null where torch is not preloaded.)

Its end of file ends this process.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from typing import Any, NamedTuple

from elasticjob.agent import run_main

MAX_DESCRIPTORS = 250
"""Of one message; the kernel's limit is 253."""
TRIAL_DEADLINE = 20.0
"""Seconds: the trial takes milliseconds, but four nodes may be importing on two cores."""
RESERVE_DELAY = 2.0
"""Seconds of quiet before workers are forked ahead of need."""
_HELD_AT_IMPORT = {"OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""While importing: numpy's OpenBLAS starts no thread, and `torch.cuda.is_available()` creates no CUDA state."""


class Worker(NamedTuple):
    """What a fork needs to become a worker."""

    env: dict[str, str]
    descriptors: list[int]
    """What those that come with it become."""
    place: dict[str, Any] | None = None
    """Fields of `run_main.Place`."""


def main() -> None:
    """Arguments: the agent's code (to be taken off sys.path), descriptor of the socket, JSON of the configuration."""
    code_root, descriptor, raw = sys.argv[1:4]
    sys.path.remove(code_root)
    _forget_ourselves()
    config = json.loads(raw)
    command = config["command"] and run_main.Command(**config["command"])
    if command:
        run_main.prepare_path(command)
    elif not run_main.keeps_path():
        del sys.path[0]  # the empty string of `-c`
    run_main.show_command(["elasticjob-warm"])
    control = socket.socket(fileno=int(descriptor))
    held = _hold_environment()
    started = time.monotonic()
    missing = _preload(config["preload"])
    verdict = _threads() or _trial()
    _release_environment(held)
    verdict |= {"seconds": round(time.monotonic() - started, 3), "missing": missing}
    gc.collect()
    gc.freeze()  # a collection in a worker must not copy the pages it shares
    control.send(json.dumps(verdict).encode())
    if not verdict["ready"]:
        return
    worker = _serve(control, os.getppid(), config["workers"], 1 if command is None else config["workers"])
    if worker.place is not None:
        command = run_main.take(run_main.Place(**worker.place))
    run_main.run(command, worker.env)


def _forget_ourselves() -> None:
    """The user's code may have its own `elasticjob`."""
    for name in [n for n in sys.modules if n.split(".")[0] == "elasticjob"]:
        del sys.modules[name]


def _hold_environment() -> dict[str, str | None]:
    held = {name: os.environ.get(name) for name in _HELD_AT_IMPORT}
    os.environ.update(_HELD_AT_IMPORT)
    return held


def _release_environment(held: dict[str, str | None]) -> None:
    for name, value in held.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _preload(modules: list[str]) -> list[str]:
    """Import what can be imported; what cannot is the script's business."""
    missing = []
    for name in modules:
        try:
            importlib.import_module(name)
        except BaseException as error:
            missing.append(f"{name}: {type(error).__name__}: {error}")
    return missing


def _threads() -> dict[str, Any] | None:
    """A fork has none of its parent's other threads, and whatever they held locked stays locked."""
    count = len(list(os.scandir("/proc/self/task"))) - 1
    if not count:
        return None
    names = ", ".join(sorted({t.name for t in threading.enumerate() if t is not threading.main_thread()}))
    why = f"importing the preloaded modules started {count} thread(s){f': {names}' if names else ''}"
    return {"ready": False, "why": why}


# ---- the trial ---------------------------------------------------------------------------------------------------


def _trial() -> dict[str, Any]:
    """Fork once and compute in parallel: an OpenMP region entered before the fork would hang there for ever."""
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        _try(writable)
    os.close(writable)
    heard, _, _ = select.select([readable], [], [], TRIAL_DEADLINE)
    answer = os.read(readable, 4096) if heard else b""
    os.close(readable)
    if not answer:
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    if not heard:
        return {"ready": False, "why": f"a forked process hung in its first parallel operation ({TRIAL_DEADLINE} s)"}
    if not answer:
        return {"ready": False, "why": "a forked process died in its first parallel operation"}
    result: dict[str, Any] = json.loads(answer)
    return result


def _try(writable: int) -> None:
    """In the trial fork: compute, answer, end."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        torch = sys.modules.get("torch")
        result = {"ready": True, "libuv": None} if torch is None else _try_torch(torch)
    except BaseException as error:
        result = {"ready": False, "why": f"{type(error).__name__}: {error}"[:1000]}
    os.write(writable, json.dumps(result).encode())
    os._exit(0)


def _try_torch(torch: Any) -> dict[str, Any]:
    if torch.cuda._is_in_bad_fork():
        return {"ready": False, "why": "importing the preloaded modules initialized CUDA"}
    ones = torch.ones(512, 512, requires_grad=True)
    (ones @ ones).relu().sum().backward()
    torch.ones(1 << 20).sum().item()
    return {"ready": True, "libuv": _has_libuv(torch)}


def _has_libuv(torch: Any) -> bool:
    """Whether torch's TCPStore client accepts its own default: some distributions build without libuv."""
    if not torch.distributed.is_available():
        return True
    from datetime import timedelta

    try:
        torch.distributed.TCPStore("127.0.0.1", 1, None, False, timedelta(milliseconds=1), use_libuv=True)
    except Exception as error:
        return "libuv" not in str(error)
    return True


# ---- workers in reserve --------------------------------------------------------------------------------------------


class Reserve(NamedTuple):
    """Processes forked ahead of need, each waiting on its socket for what makes it a worker.

    They are forked twice: their parent is `middle`, which ends as they are released, so that the agent (a child
    subreaper) becomes their parent and gets their exit status.
    """

    middle: int
    pids: list[int]
    sockets: list[socket.socket]
    hold: int
    """Descriptor: `middle` ends when it is closed."""

    def release(self, workers: list[dict[str, Any]], descriptors: list[int]) -> None:
        """Let them go as workers of the agent (fields of `Worker`, and the descriptors of all)."""
        for control, worker in zip(self.sockets, workers, strict=True):
            count = len(worker["descriptors"])
            socket.send_fds(control, [json.dumps(worker).encode()], descriptors[:count])
            descriptors = descriptors[count:]
            control.close()
        os.close(self.hold)
        os.waitpid(self.middle, 0)


def _serve(control: socket.socket, agent: int, count: int, size: int) -> Worker:
    """Keep `count` processes in reserve, released `size` at a time as asked, for ever. Returns in a worker only."""
    reserves: list[Reserve] = []
    while True:
        # Not while the workers just released start: they want the processors.
        quiet = len(reserves) < count // size and not select.select([control], [], [], RESERVE_DELAY)[0]
        request = None if quiet else socket.recv_fds(control, 1 << 20, MAX_DESCRIPTORS)
        if request is not None and not request[0]:
            os._exit(0)
        if quiet or not reserves:
            mustered = _muster(size, agent, control)
            if isinstance(mustered, Worker):
                return mustered
            reserves.append(mustered)
        if request is not None:
            reserve = reserves.pop()
            reserve.release(json.loads(request[0])["workers"], request[1])
            for descriptor in request[1]:
                os.close(descriptor)
            control.send(json.dumps({"pids": reserve.pids}).encode())


def _muster(count: int, agent: int, control: socket.socket) -> Reserve | Worker:
    """Fork a reserve. In each of its processes this returns a `Worker`, once released."""
    sys.stdout.flush()
    sys.stderr.flush()
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(count)]
    (answers, answer), (wait, hold) = os.pipe(), os.pipe()
    middle = os.fork()
    if middle == 0:
        control.close()
        os.close(answers)
        os.close(hold)
        for ours, _ in pairs:
            ours.close()
        return _fork_reserve([theirs for _, theirs in pairs], agent, answer, wait)
    for descriptor in (answer, wait):
        os.close(descriptor)
    for _, theirs in pairs:
        theirs.close()
    with os.fdopen(answers, "rb") as told:
        pids: list[int] = json.loads(told.read())
    return Reserve(middle, pids, [ours for ours, _ in pairs], hold)


def _fork_reserve(waiting: list[socket.socket], agent: int, answer: int, wait: int) -> Worker:
    middle, pids = os.getpid(), []
    for control in waiting:
        pid = os.fork()
        if pid == 0:
            for descriptor in (answer, wait):
                os.close(descriptor)
            for other in waiting:
                if other is not control:
                    other.close()
            return _await_release(control, middle, agent)
        pids.append(pid)
    for control in waiting:
        control.close()
    os.write(answer, json.dumps(pids).encode())
    os.close(answer)
    os.read(wait, 1)
    os._exit(0)


def _await_release(control: socket.socket, middle: int, agent: int) -> Worker:
    """In a process of the reserve: become a worker with its own session and output, that ends with the agent."""
    data, descriptors, _, _ = socket.recv_fds(control, 1 << 20, MAX_DESCRIPTORS)
    if not data:
        os._exit(0)
    control.close()
    worker = Worker(**json.loads(data))
    os.setsid()
    _place(descriptors, worker.descriptors)
    if worker.place is not None:
        for closed in {0, 1, 2}.difference(worker.descriptors):
            os.close(closed)
    while os.getppid() == middle:
        os.sched_yield()  # the death signal below must mean the agent, not the process between
    run_main.die_with_parent()
    if os.getppid() != agent:
        os._exit(1)
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
