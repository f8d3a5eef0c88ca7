"""A launcher that starts below a worker: torchrun, accelerate, and what else calls torch's agent.

torch's agent (`launch_agent`) would start ranks of its own. Where the pod's command runs once, the launcher hands its
program over to the agent of the pod, which starts it as the ranks, and waits for them (`hand_over.py`). Where the
command has started once for each local rank, this process becomes the program that torch's agent would start, as the
rank that it already is. What the launcher has set in its environment stays. A program that goes on after its launcher
waits for it.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from string import Template

from .assigned import TRAINS, assigned, restore_assigned
from .hand_over import begin_as_rank, hand_over
from .one_world import ALLOWED, LAUNCHES, cannot_patch, fail

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import ModuleType
    from typing import Any

LAUNCHED = "ELASTICJOB_LAUNCHED"
"""1 in the program that a launcher below this worker has started."""
SHIMS = "ELASTICJOB_SHIMS"
"""The agent's folder of shims, by which Python starts as a fork; absent without them."""
PROGRAMS = (
    "torchrun",
    "accelerate",
    "accelerate-launch",
    "tune",
    "trl",
    "axolotl",
    "fabric",
    "swift",
    "deepspeed",
    "composer",
)
"""Launchers that do nothing after their workers have ended, so that their process may become the worker."""
PACKAGES = ("torch.distributed.", "accelerate.", "deepspeed.", "composer.")
"""Packages of these launchers: `python -m` runs one of their modules."""
_POD_ADDRESS = "the address is the pod's; set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME for another network"
_COUNTS_ITSELF = {"auto", "gpu", "cpu", "xpu"}


def replace_agent(module: ModuleType) -> None:
    """Replace `launch_agent` of torch.distributed.launcher.api."""
    launch = getattr(module, "launch_agent", None)
    if launch is None:
        cannot_patch("launch_agent")
        return

    @functools.wraps(launch)
    def launch_agent(config: Any, entrypoint: Any, args: Any, *others: Any, **named: Any) -> dict[int, Any]:
        if not assigned() or os.environ.get(ALLOWED) == "1":
            result: dict[int, Any] = launch(config, entrypoint, args, *others, **named)
            return result
        return _become_worker(config, entrypoint, list(args or ()))

    module.launch_agent = launch_agent  # type: ignore[attr-defined]


def _become_worker(config: Any, entrypoint: Any, args: Sequence[Any]) -> dict[int, Any]:
    """Run the entry point as the rank that this process belongs to; a command that is a launcher never returns.

    Where the command runs once in its pod, all ranks of the pod run it, and this returns once they have ended.
    """
    refuse_in_training()
    restore_assigned()
    if getattr(config, "local_addr", None) and os.environ["LOCAL_RANK"] == "0":
        print(f"[elasticjob] --local-addr has no effect: {_POD_ADDRESS}", file=sys.stderr)
    check = functools.partial(_check_number, int(config.nproc_per_node), int(config.max_nodes))
    if LAUNCHES in os.environ and not callable(entrypoint):
        role = "" if config.role == "default" else str(config.role)
        argv = [str(entrypoint), *map(str, args)]
        if end_as_ranks(hand_over(argv, check, role=role, log_options=log_options(config))):
            return {int(os.environ["RANK"]): None}
    begin_as_rank()
    check()
    if config.role != "default":  # a launcher that names no role has this one; the worker has the job's
        os.environ["ROLE_NAME"] = str(config.role)
    rank = int(os.environ["RANK"])
    if callable(entrypoint):
        with _launched():
            return {rank: entrypoint(*args)}
    _note_log_options(config)
    words = [Template(str(arg)).safe_substitute(local_rank=os.environ["LOCAL_RANK"]) for arg in args]
    _run_in_place([str(entrypoint), *words], "nodes and rendezvous")
    return {rank: None}


def end_as_ranks(code: int | None) -> bool:
    """Return whether the agent has run this launcher's ranks with success; SystemExit if they have failed."""
    if code:
        raise SystemExit(code if code > 0 else 128 - code)
    return code == 0


def log_options(config: Any) -> dict[str, str]:
    """Return the options of logs that the launcher has, by torchrun's long names. torch has read PET_* already."""
    specs = getattr(config, "logs_specs", None)
    folder = getattr(specs, "_root_log_dir", None) or os.devnull
    is_own = os.path.basename(folder).startswith("torchelastic_")  # noqa: PTH119  # torch's, if the launcher names none
    ranks = getattr(specs, "_local_ranks_filter", None)
    options = {
        "log-dir": "" if folder == os.devnull or is_own else os.path.abspath(folder),  # noqa: PTH100
        "redirects": _streams(getattr(specs, "_redirects", None)),
        "tee": _streams(getattr(specs, "_tee", None)),
        "local-ranks-filter": ",".join(map(str, sorted(ranks))) if ranks else "",
        "log-line-prefix-template": getattr(config, "log_line_prefix_template", None) or "",
    }
    return {name: value for name, value in options.items() if value}


def _streams(value: Any) -> str:
    """Return the text of torch's `Std`, or of a dict of it by local rank; empty for none."""
    if isinstance(value, dict):
        return ",".join(f"{rank}:{int(std)}" for rank, std in sorted(value.items()))
    return str(int(value)) if value else ""


def _note_log_options(config: Any) -> None:
    """Say which options of logs have no effect, unless the agent has them from the pod template."""
    variables = (f"PET_{name.replace('-', '_').upper()}" for name in log_options(config))
    lost = [name for name in variables if name not in os.environ and "TEMPLATE" not in name]
    if lost and os.environ["LOCAL_RANK"] == "0":
        text = f"the launcher's options of logs have no effect: set {', '.join(lost)} in the pod template"
        print(f"[elasticjob] {text}", file=sys.stderr)


def become_rank(argv: list[str], without_effect: str) -> None:
    """Run a program in place of the launcher that this process is, as the rank that this process belongs to.

    `without_effect`: what has no effect of the launcher's options, such as `nodes and ports`.
    """
    refuse_in_training()
    begin_as_rank()
    restore_assigned()
    _run_in_place(argv, without_effect)


def refuse_in_training() -> None:
    """Raise SeparateWorldError if a rank of this worker trains already."""
    if TRAINS in os.environ or LAUNCHED in os.environ:
        fail(
            "a launcher starts below a worker that trains already: it would train apart from the others. Start the"
            f" script without it, or set {ALLOWED}=1 in the pod template if this is meant"
        )


def check_local_number(asked: int, unit: str = "in each pod") -> None:
    """Raise SeparateWorldError if a launcher asks for another number of workers than the node has."""
    local = int(assigned()["LOCAL_WORLD_SIZE"])
    if asked != local:
        fail(
            f"the launcher asks for {asked} workers {unit}, and the job has {local} in each pod: set"
            f" spec.nprocPerNode: {asked}, or leave the number out of the command"
        )


def _run_in_place(argv: list[str], without_effect: str) -> None:
    text = f"[elasticjob] rank {os.environ['RANK']} runs {' '.join(argv)[:500]} in place of {sys.argv[0]}"
    print(f"{text}, whose {without_effect} have no effect", file=sys.stderr)
    with _launched():
        _run(argv)


@contextmanager
def _launched() -> Iterator[None]:
    """Mark what runs in place of a launcher; what follows it is another stage."""
    os.environ[LAUNCHED] = "1"
    try:
        yield
    finally:
        os.environ.pop(LAUNCHED, None)
        os.environ.pop(TRAINS, None)


def _check_number(asked: int, nodes: int) -> None:
    """Fail if a launcher asks for another number of workers than a node has.

    accelerate's number is that of all nodes unless its command line has the number of nodes, and an elastic job has not
    always the same number of nodes. A launcher that counts processors or GPUs itself asks for no number.
    """
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    of_all_nodes = "ACCELERATE_MIXED_PRECISION" in os.environ and nodes == 1
    if asked == local or (of_all_nodes and asked % local == 0):
        return
    if _COUNTS_ITSELF & {word.rpartition("=")[2] for word in sys.argv}:
        return
    unit = "in all" if of_all_nodes else "in each pod"
    check_local_number(asked, unit)


def _run(argv: list[str]) -> None:
    """Replace this process by a program, or run it if the calling program goes on after it."""
    program = shutil.which(argv[0]) or argv[0]
    shim = os.path.join(os.environ.get(SHIMS, ""), os.path.basename(program))  # noqa: PTH118, PTH119
    if SHIMS in os.environ and os.access(shim, os.X_OK) and _behind_shim(program) == program:
        program = shim
    sys.stdout.flush()
    sys.stderr.flush()
    command = [program, *argv[1:]]
    if _ends_with_its_workers():
        os.execv(program, command)  # noqa: S606
    process = subprocess.Popen(command)
    before = signal.signal(signal.SIGTERM, lambda number, frame: process.send_signal(number))
    try:
        code = process.wait()
    finally:
        signal.signal(signal.SIGTERM, before)
    if code:
        raise SystemExit(code if code > 0 else 128 - code)


def _ends_with_its_workers() -> bool:
    """Return whether this process is a launcher, and not a program that calls one in Python."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    name = spec.name.removesuffix(".__main__") if spec is not None else os.path.basename(sys.argv[0])  # noqa: PTH119
    return name in PROGRAMS or name.startswith(PACKAGES)


def _behind_shim(program: str) -> str | None:
    """Return the program that the shim of this name stands for."""
    folders = [entry for entry in os.environ.get("PATH", "").split(os.pathsep) if entry != os.environ[SHIMS]]
    return shutil.which(os.path.basename(program), path=os.pathsep.join(folders))  # noqa: PTH119
