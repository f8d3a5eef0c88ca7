"""A training script for jobs whose faults a test chooses: `python faulty_training.py FOLDER [--alone STEPS]`.

`--queued-device`: `queued_training` has another training, on a device that works behind the host.

It trains a linear model in an `@elasticjob.restartable` function with the state in an `elasticjob.State`. An
`ElasticSampler` and `microbatches` deal the samples, so any number of ranks must compute in each step what one process
computes, with the same samples. Each rank appends a line to FOLDER/records for each call and each step. Before it goes
on from one of its `points`, it looks into FOLDER/plan.json for a fault that it has to inject into itself.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import elasticjob

SAMPLES, BATCH, MAX_SIZE = 241, 10, 2
"""Samples of an epoch, of a step on all ranks together, and of a micro-batch at most. 3 and 4 ranks have unequal shares
of a step, and in the last step of an epoch one rank has a sample and the others have none."""
FORM_TIMEOUT = timedelta(seconds=20)
"""How long the ranks wait for one that does not form the process group, or is silent in a collective."""
SLOW_SECONDS = 2.0
"""Seconds that a slow rank needs more for a step."""
TOGETHER_SECONDS = 5.0
"""Seconds that a rank waits for another one at the same step: less than the time after which it counts as hung."""


class RankWithFaults:
    """A rank that records what it does, and injects its faults."""

    def __init__(self, folder: Path, delay: float) -> None:
        self.folder, self.delay = folder, delay
        self.pairs: Any = None
        self.state: Any = None
        self._records = os.open(folder / "records", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def train(self, steps: int) -> None:
        """Train in one round."""
        raise NotImplementedError

    def set_up(self, seconds: float) -> None:
        """Do what a script does before its function, and record that it is done."""
        time.sleep(seconds)
        round_id = os.environ.get("ELASTICJOB_ROUND", "-")
        os.write(self._records, f"set-up {round_id} - - {os.getpid()} - 0 - {time.time():.4f}\n".encode())

    def stop_requested(self) -> bool:
        """Return on all ranks alike whether the training is to end."""
        stop = torch.tensor(float((self.folder / "done").exists()))
        dist.all_reduce(stop, dist.ReduceOp.MAX, group=self.pairs)
        return bool(stop)

    def record(self, kind: str, gradient: str, parameters: float) -> None:
        """Append a line to the records."""
        where = f"{os.environ.get('ELASTICJOB_ROUND', '-')} {dist.get_rank()} {dist.get_world_size()} {os.getpid()}"
        line = f"{kind} {where} {gradient} {self.state.step} {parameters.hex()} {time.time():.4f}\n"
        os.write(self._records, line.encode())

    # ---- faults

    def point(self, name: str) -> None:
        """Inject the fault that the plan has for this rank here, once."""
        try:
            plan = json.loads((self.folder / "plan.json").read_text())
        except FileNotFoundError:
            return
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        for index, fault in enumerate(plan["faults"]):
            here = fault["point"] == name and fault["rank"] % world == rank
            if not here or self.state.step < fault["step"] or (plan["same_step"] and not self._all_here(plan, index)):
                continue
            if self._may_fire(plan["number"], index, fault["recovery"]):
                self._inject(fault["kind"], f"{plan['number']}-{index}")

    def _all_here(self, plan: dict[str, Any], index: int) -> bool:
        """Wait until all ranks with a fault are here at this step. Return False if one has passed.

        That one sees the plan at the next step, which it cannot complete without this rank.
        """
        names = [f"here-{plan['number']}-{other}-{self.state.step}" for other in range(len(plan["faults"]))]
        (self.folder / names[index]).touch()
        deadline = time.monotonic() + TOGETHER_SECONDS
        while not (complete := all((self.folder / name).exists() for name in names)) and time.monotonic() < deadline:
            time.sleep(0.005)
        return complete

    def _may_fire(self, number: int, index: int, in_recovery: bool) -> bool:
        """Claim a fault. One that belongs into a recovery waits for the round after that of the fault before it."""
        round_id = os.environ.get("ELASTICJOB_ROUND", "-")
        if in_recovery:
            before = self.folder / f"fired-{number}-{index - 1}"
            if not before.exists() or json.loads(before.read_text())["round"] == round_id:
                return False
        fired = self.folder / f"fired-{number}-{index}"
        if fired.exists():
            return False
        content = {"pid": os.getpid(), "rank": int(os.environ["RANK"]), "round": round_id, "time": time.time()}
        complete = self.folder / f"claim-{os.getpid()}"
        complete.write_text(json.dumps(content))
        complete.rename(fired)
        return True

    def _inject(self, kind: str, name: str) -> None:
        match kind:
            case "exception":
                raise ValueError("requested by the test")
            case "memory error":
                _exceed_address_space()
            case "exit":
                sys.exit(3)
            case "SIGKILL" | "SIGSTOP":
                os.kill(os.getpid(), signal.Signals[kind])
            case "SIGSEGV":
                ctypes.string_at(0)
            case "killed for memory":
                _exceed_memory_limit(self.folder)
            case "interpreter held":
                _hold_interpreter()
            case "deadlock in a collective":
                dist.all_reduce(torch.zeros(1), group=self.pairs)  # the other ranks enter another collective
            case "slow rank":
                time.sleep(SLOW_SECONDS)
            case _:  # the test injects it
                while not (self.folder / f"injected-{name}").exists():
                    time.sleep(0.005)


class Training(RankWithFaults):
    """What outlives a call of the function."""

    def __init__(self, folder: Path, delay: float) -> None:
        super().__init__(folder, delay)
        self.gradient = torch.zeros((), dtype=torch.float64)
        torch.manual_seed(0)
        self.model = torch.nn.Linear(8, 4, dtype=torch.float64)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, _rate)
        self.probe = torch.randn(4, 8, dtype=torch.float64)
        inputs = torch.randn(SAMPLES, 8, dtype=torch.float64)
        noise = torch.randn(SAMPLES, 4, dtype=torch.float64)
        self.data = TensorDataset(inputs, inputs @ torch.randn(8, 4, dtype=torch.float64) + 0.1 * noise)
        self.sampler = elasticjob.ElasticSampler(self.data, seed=5)
        self.batches = elasticjob.microbatches(BATCH, self.sampler, max_size=MAX_SIZE)
        self.state = elasticjob.State(
            model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, sampler=self.sampler, step=0
        )
        self.model.weight.register_hook(lambda _: self.point("backward"))

    def train(self, steps: int) -> None:
        """Train in one round."""
        self.point("called")
        dist.init_process_group("gloo", timeout=FORM_TIMEOUT)
        self.pairs = dist.new_group(range(dist.get_world_size()))
        self.point("formed")
        self.state.sync()
        model = DistributedDataParallel(self.model, init_sync=False)
        self.record("begin", "-", self._parameters())
        self.point("synced")
        for batches in self._steps():
            if self.state.step >= steps or self.stop_requested():
                break
            self._step(model, batches)
            self.record("step", self.gradient.item().hex(), self._parameters())
            self.point("step")
            if self.state.step % 5 == 0:
                self.state.commit(non_blocking=self.state.step % 10 == 0)
            elasticjob.progress(self.state.step)
            time.sleep(self.delay)
        dist.destroy_process_group()

    def _steps(self) -> Iterator[Any]:
        """Yield the steps of all epochs, from the position of the sampler on."""
        loader = DataLoader(self.data, batch_sampler=self.batches)
        while True:
            yield from self.batches.steps(loader)

    def _step(self, model: DistributedDataParallel, batches: Any) -> None:
        self.optimizer.zero_grad()
        self.point("forward")
        for batch in batches:
            inputs, targets = batch.data
            with batch.gradient_sync(model):
                (torch.nn.functional.mse_loss(model(inputs), targets) * batch.weight).backward()
        assert self.model.weight.grad is not None
        self.gradient = (self.model.weight.grad * self.probe).sum()
        self.optimizer.step()
        self.point("optimizer")
        self.scheduler.step()
        self.state.step += 1

    def _parameters(self) -> float:
        return float((self.model.weight.detach() * self.probe).sum())


def _rate(step: int) -> float:
    return 1.0 + 0.5 * math.cos(step / 50)


def _exceed_address_space() -> None:
    """Raise the MemoryError of an allocation that the kernel refuses."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size + (256 << 20), hard))
    try:
        bytearray(1 << 32)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _exceed_memory_limit(folder: Path) -> NoReturn:
    """Move into the control group that the test has made, and allocate until the kernel kills this process."""
    group = Path((folder / "memory-group").read_text())
    (group / "cgroup.procs").write_text(str(os.getpid()))
    kept = []
    while True:
        kept.append(bytearray(b"x") * (8 << 20))


def _hold_interpreter() -> None:
    """Wait for ever in C with Python's lock held: no thread of this process can run Python."""
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--alone", type=int, metavar="STEPS", help="train so many steps in one process")
    parser.add_argument("--step-delay", type=float, default=0.0, help="seconds to wait after each step")
    parser.add_argument("--spare-process", action="store_true", help="ask for a spare process of each rank")
    parser.add_argument("--queued-device", action="store_true", help="train on a device that works behind the host")
    parser.add_argument("--set-up", type=float, default=0.0, metavar="SECONDS", help="wait before the function")
    options = parser.parse_args()
    torch.set_num_threads(1)
    kind: type[RankWithFaults] = Training
    if options.queued_device:
        sys.path.insert(0, str(Path(__file__).parents[2]))
        from support.training.queued_training import QueuedTraining

        kind = QueuedTraining
    training = kind(options.folder, options.step_delay)
    if options.set_up:
        training.set_up(options.set_up)
    elasticjob.restartable(spare_process=options.spare_process)(training.train)(options.alone or sys.maxsize)


if __name__ == "__main__":
    main()
