"""Health checks of this Node: shared memory, disk, clock, GPUs. Each check returns the problem, or "" if healthy.

A check passes when its prerequisite is absent, such as nvidia-smi in the image or permission to read the kernel log.
"""

from __future__ import annotations

import asyncio
import errno
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

from elasticjob._runtime.contract.messages import Failure, FailureClass
from elasticjob._runtime.system.code_root import CODE_ROOT
from elasticjob._runtime.system.memory_file import SHARED_MEMORY

log = logging.getLogger(__name__)

CHECK_TIMEOUT = 60.0
"""Seconds for all checks. Eight GPUs take ten seconds when their driver has to initialize. A slow but healthy disk may
take longer, so a check that is not done in time is only a suspicion."""
MIN_SHARED_MEMORY = 1 << 20
"""Bytes of shared memory that must be free. gloo and NCCL allocate this much when they start."""
EARLIEST_CLOCK = 1_735_689_600.0
"""Unix seconds (2025-01-01): a clock before this was never set."""
KERNEL_LOG = "/dev/kmsg"
CUDA = "libcuda.so.1"

_MAX_TEXT = 1024
"""Characters of a problem that are reported."""
_FULL = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT))
"""How the texts of problems end that another pod may have caused, and that end with that pod."""
_QUERY = ("index", "ecc.errors.uncorrected.volatile.total", "remapped_rows.pending", "remapped_rows.failure")
_NVIDIA_SMI_ERROR = re.compile(
    r"(GPU is lost|Unable to determine the device handle|No devices were found|has failed)[^\n]*"
)
_FATAL_XID = re.compile(rb"NVRM: Xid \(([^)]*)\): (48|62|64|74|79|92|95|119|120|140|143)\b[^\n\x00]*")
"""Xid codes of uncontained memory errors, NVLink errors, a GPU that is off its bus, and firmware that hangs."""

COMPUTE_CHECK = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from elasticjob._runtime.agent.monitoring.node.gpu_compute import main; main(sys.argv[2])"
)


@dataclass(frozen=True)
class HealthProblem:
    """Why no worker may train on the Node now."""

    text: str
    suspected: bool = False
    """Whether a healthy Node may show it too: storage is full, or a check takes long."""

    def failure(self, pod: str, now: float) -> Failure:
        """Return the problem as the agent reports it. `now`: Unix seconds."""
        text = self.text[:_MAX_TEXT]
        return Failure(FailureClass.DEVICE_UNHEALTHY, pod, now, message=text, suspected=self.suspected)


# ---- single checks -------------------------------------------------------------------------------------------------


def check_shared_memory(path: str = SHARED_MEMORY) -> str:
    """Check that MIN_SHARED_MEMORY bytes can be allocated."""
    if not Path(path).is_dir():
        return ""
    try:
        with tempfile.TemporaryFile(dir=path) as file:
            os.posix_fallocate(file.fileno(), 0, MIN_SHARED_MEMORY)
    except OSError as error:
        return f"{path}: {error.strerror}"
    return ""


def check_disk(directory: str) -> str:
    """Check that data can be written, synced and read back."""
    data = os.urandom(4096)
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            file.seek(0)
            if file.read() != data:
                return f"the disk at {directory} returned other bytes than were written"
    except OSError as error:
        return f"the disk at {directory}: {error.strerror}"
    return ""


def check_clock(now: float) -> str:
    """Check that the clock was ever set: certificates and checkpoints depend on it."""
    return "" if now >= EARLIEST_CLOCK else f"the clock is not set: {time.strftime('%Y-%m-%d', time.gmtime(now))}"


@dataclass
class Gpus:
    """The GPUs of this Node as nvidia-smi reports them."""

    expected: int
    """The number of GPUs that the container requests; with 0 they are not checked."""
    errors: dict[str, int] = field(default_factory=dict)
    """Uncorrectable memory errors of each GPU at the first check. An earlier job had them, and they may be repaired."""

    def evaluate(self, output: str) -> str:
        """Return the problem that nvidia-smi's output shows. Output in an unknown format (an old driver) shows none."""
        if error := _NVIDIA_SMI_ERROR.search(output):
            return error.group(0)
        rows = [[cell.strip() for cell in line.split(",")] for line in output.splitlines()]
        rows = [row for row in rows if len(row) == len(_QUERY) and row[0].isdigit()]
        if not rows:
            return ""
        if len(rows) < self.expected:
            return f"nvidia-smi lists {len(rows)} of {self.expected} GPUs"
        return next(filter(None, (self._evaluate_one(*row) for row in rows)), "")

    def _evaluate_one(self, index: str, errors: str, pending: str, failed: str) -> str:
        if failed == "Yes":
            return f"GPU {index}: memory row remapping failed; replace the GPU"
        if pending == "Yes":
            return f"GPU {index}: a memory row remapping is pending; reset the GPU"
        count = int(errors) if errors.isdigit() else 0
        if count > self.errors.setdefault(index, count):
            return f"GPU {index}: uncorrectable memory error"
        return ""


class KernelLog:
    """Fatal GPU errors (Xid) in the kernel log since the start; none when the log cannot be read."""

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
        """Return the first fatal error since the last call."""
        found = ""
        while self._file >= 0:
            try:
                record = os.read(self._file, 8192)
            except BrokenPipeError:
                continue  # the kernel has overwritten records that were not read yet
            except OSError:
                break
            if not record:
                break
            if (match := _FATAL_XID.search(record)) and not found:
                found = match.group(0).decode(errors="replace")
        return found


# ---- all checks ----------------------------------------------------------------------------------------------------


class NodeHealth:
    """The checks of one Node. They run in a thread, because a disk or a driver that hangs must not block the agent."""

    def __init__(self, directory: str, gpus: int, env: Mapping[str, str], helper_pids: set[int]) -> None:
        """`directory`: where the disk is checked. `gpus`: the number that the container requests.

        `helper_pids`: holds the process ids of the programs of checks while they run.
        """
        self._directory = directory
        self._gpus = Gpus(gpus)
        self._env = env
        self._helper_pids = helper_pids
        self._log = KernelLog() if gpus else None
        self._computed = not gpus
        """Whether the compute check has run. It runs once: later the workers may use all GPU memory."""

    async def find_problem(self, timeout: float = CHECK_TIMEOUT) -> HealthProblem | None:
        """Run all checks; return the first problem, or None if this Node is healthy."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[str] = loop.create_future()

        def check() -> None:
            try:
                found = self.run_checks()
            except Exception:
                log.exception("a health check failed to run; the Node counts as healthy")
                found = ""
            # The event loop may be closed, or the wait may have timed out.
            try:
                loop.call_soon_threadsafe(lambda: None if answer.done() else answer.set_result(found))
            except RuntimeError:
                return

        threading.Thread(target=check, daemon=True, name="health").start()
        try:
            found = await asyncio.wait_for(answer, timeout)
        except asyncio.TimeoutError:
            text = f"health checks did not finish within {timeout:g} s: the disk or the GPU driver hangs"
            return HealthProblem(text, suspected=True)
        return HealthProblem(found, found.endswith(_FULL)) if found else None

    def run_checks(self) -> str:
        """Run the checks, cheap ones first, up to the first problem; return it, or ""."""
        checks: tuple[Callable[[], str], ...] = (
            lambda: check_clock(time.time()),
            check_shared_memory,
            lambda: check_disk(self._directory),
            lambda: self._log.fatal() if self._log else "",
            self._query_gpus,
            self._compute_on_gpus,
        )
        return next(filter(None, (check() for check in checks)), "")

    def _query_gpus(self) -> str:
        if not self._gpus.expected:
            return ""
        program = shutil.which("nvidia-smi", path=self._env.get("PATH"))
        if program is None:
            return ""
        output = self._run([program, f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"])
        return self._gpus.evaluate(output)

    def _compute_on_gpus(self) -> str:
        if self._computed:
            return ""
        self._computed = True
        output = self._run([sys.executable, "-c", COMPUTE_CHECK, CODE_ROOT, CUDA]).strip()
        if output.startswith("GPU "):
            return output
        if output:
            log.info("%s", output)
        return ""

    def _run(self, argv: Sequence[str]) -> str:
        """Run a program and return all that it prints."""
        process = subprocess.Popen(
            argv,
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._helper_pids.add(process.pid)
        process.returncode = 0  # the agent reaps all children; Popen must not
        with process.stdout as pipe:  # type: ignore[union-attr]  # stdout=PIPE
            output = pipe.read()
        self._helper_pids.discard(process.pid)
        return output.decode(errors="replace")
