"""Whether this node is fit to train: shared memory, disk, clock, GPUs. Each check gives what is wrong, or nothing.

What a check needs and does not find (no nvidia-smi in the image, no right to read the kernel's log) is not checked.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from elasticjob.code_root import CODE_ROOT

log = logging.getLogger(__name__)

DEADLINE = 60.0
"""Seconds: eight GPUs whose driver has to start need ten."""
SHARED_MEMORY = "/dev/shm"  # noqa: S108
MIN_SHARED_MEMORY = 1 << 20
"""Bytes of shared memory that must be free: gloo and NCCL need as much at their start."""
EARLIEST_CLOCK = 1_735_689_600.0
"""Unix seconds: no clock that was ever set says less (2025)."""
KERNEL_LOG = "/dev/kmsg"
CUDA = "libcuda.so.1"

_QUERY = ("index", "ecc.errors.uncorrected.volatile.total", "remapped_rows.pending", "remapped_rows.failure")
_GPU_TROUBLE = re.compile(r"(GPU is lost|Unable to determine the device handle|No devices were found|has failed)[^\n]*")
_FATAL_XID = re.compile(rb"NVRM: Xid \(([^)]*)\): (48|62|64|74|79|92|95|119|120|140|143)\b[^\n\x00]*")
"""Memory errors that were not contained, links, a GPU that fell off its bus or whose firmware hangs."""

_COMPUTE = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from elasticjob.agent.monitoring.gpu_compute import main; main(sys.argv[2])"
)


# ---- what is asked of the machine ----------------------------------------------------------------------------------


def check_shared_memory(path: str = SHARED_MEMORY) -> str:
    """Whether there is room for a segment."""
    if not Path(path).is_dir():
        return ""
    try:
        with tempfile.TemporaryFile(dir=path) as file:
            os.posix_fallocate(file.fileno(), 0, MIN_SHARED_MEMORY)
    except OSError as error:
        return f"{path}: {error.strerror}"
    return ""


def check_disk(directory: str) -> str:
    """Whether what is written reaches the disk and can be read back."""
    said = os.urandom(4096)
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(said)
            file.flush()
            os.fsync(file.fileno())
            file.seek(0)
            if file.read() != said:
                return f"the disk at {directory} gives back other bytes than were written"
    except OSError as error:
        return f"the disk at {directory}: {error.strerror}"
    return ""


def check_clock(now: float) -> str:
    """Whether it was ever set: certificates and checkpoints depend on it."""
    return "" if now >= EARLIEST_CLOCK else f"the clock says {time.strftime('%Y-%m-%d', time.gmtime(now))}"


@dataclass
class Gpus:
    """What nvidia-smi says of them. `wanted`: as many as the pod asked for; 0: none are looked at."""

    wanted: int
    errors: dict[str, int] = field(default_factory=dict)
    """Uncorrectable memory errors that each had when first seen: they may be another job's, and mended since."""

    def evaluate(self, said: str) -> str:
        """What is wrong, from nvidia-smi's output. An output of another kind (an old driver) says nothing."""
        if trouble := _GPU_TROUBLE.search(said):
            return trouble.group(0)
        rows = [[cell.strip() for cell in line.split(",")] for line in said.splitlines()]
        rows = [row for row in rows if len(row) == len(_QUERY) and row[0].isdigit()]
        if not rows:
            return ""
        if len(rows) < self.wanted:
            return f"{len(rows)} of {self.wanted} GPUs are there"
        return next(filter(None, (self._judge_one(*row) for row in rows)), "")

    def _judge_one(self, index: str, errors: str, pending: str, failed: str) -> str:
        if failed == "Yes":
            return f"GPU {index}: its memory has errors that can no longer be mapped away"
        if pending == "Yes":
            return f"GPU {index}: its memory has errors and needs a reset"
        count = int(errors) if errors.isdigit() else 0
        if count > self.errors.setdefault(index, count):
            return f"GPU {index}: an uncorrectable memory error"
        return ""


class KernelLog:
    """Fatal errors of GPUs (Xid) that the kernel logs from now on; where it cannot be read, none."""

    def __init__(self, path: str = KERNEL_LOG) -> None:
        self._file = -1
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._file, 0, os.SEEK_END)
        except OSError:
            self.close()

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def fatal(self) -> str:
        """The first since the last call."""
        found = ""
        while self._file >= 0:
            try:
                record = os.read(self._file, 8192)
            except BrokenPipeError:
                continue  # records were overwritten before we came
            except OSError:
                break
            if not record:
                break
            if (match := _FATAL_XID.search(record)) and not found:
                found = match.group(0).decode(errors="replace")
        return found


# ---- all of it -------------------------------------------------------------------------------------------------


class NodeHealth:
    """The checks of one node, off the event loop: a disk or a driver that hangs must not stop the agent."""

    def __init__(self, directory: str, gpus: int, env: Mapping[str, str], spared: set[int]) -> None:
        """`spared`: where the process ids of its programs are kept while they run: they are no workers."""
        self._directory = directory
        self._gpus = Gpus(gpus)
        self._env = env
        self._spared = spared
        self._log = KernelLog() if gpus else None
        self._tried = not gpus
        """Whether the GPUs have computed; once is enough, since later their memory may be the workers'."""

    async def find_problem(self, deadline: float = DEADLINE) -> str:
        """What is wrong; empty where this node is fit."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[str] = loop.create_future()

        def look() -> None:
            try:
                found = self.run_checks()
            except Exception:
                log.exception("health checks")
                found = ""  # our own trouble, not the node's
            # The loop may be closed, or nobody may wait any more.
            try:
                loop.call_soon_threadsafe(lambda: None if answer.done() else answer.set_result(found))
            except RuntimeError:
                return

        threading.Thread(target=look, daemon=True, name="health").start()
        try:
            return await asyncio.wait_for(answer, deadline)
        except asyncio.TimeoutError:
            return f"its health checks hang ({deadline:g} s): the disk, or the driver of its GPUs"

    def run_checks(self) -> str:
        """All checks, cheap ones first."""
        checks: tuple[Callable[[], str], ...] = (
            lambda: check_clock(time.time()),
            check_shared_memory,
            lambda: check_disk(self._directory),
            lambda: self._log.fatal() if self._log else "",
            self._ask_gpus,
            self._try_gpus,
        )
        return next(filter(None, (check() for check in checks)), "")

    def _ask_gpus(self) -> str:
        program = shutil.which("nvidia-smi", path=self._env.get("PATH"))
        if not self._gpus.wanted or program is None:
            return ""
        said = self._run([program, f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"])
        return self._gpus.evaluate(said)

    def _try_gpus(self) -> str:
        if self._tried:
            return ""
        self._tried = True
        said = self._run([sys.executable, "-c", _COMPUTE, CODE_ROOT, CUDA]).strip()
        if said.startswith("GPU "):
            return said
        if said:
            log.info("%s", said)
        return ""

    def _run(self, argv: Sequence[str]) -> str:
        """All that a program prints."""
        process = subprocess.Popen(
            argv,
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._spared.add(process.pid)
        process.returncode = 0  # the agent reaps
        with process.stdout as output:  # type: ignore[union-attr]  # a pipe, as asked for
            said = output.read()
        self._spared.discard(process.pid)
        return said.decode(errors="replace")
