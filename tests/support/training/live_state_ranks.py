"""Three ranks (processes with gloo) that go through several rounds without ending: `python live_state_ranks.py FOLDER`.

Prints one line of JSON: for each scenario, what each rank returned. A rank that fails in its step leaves the round by
an exception. It destroys its process group, which ends the collectives of the others; then all begin the next round.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import struct
import sys
import tempfile
import traceback
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from elasticjob._runtime.contract.snapshot_format.state_file import read_file_header
from elasticjob.training import devices, group_device, progress_channel, random_states
from elasticjob.training.progress_channel import ChannelState
from elasticjob.training.replicated.rank_random_states import note_interruption
from elasticjob.training.replicated.state import State, internals
from elasticjob.training.state_exchange import Exchange
from elasticjob.training.update_guard import guard

WORLD = 3
STEPS = 6
NODES = [tuple(os.memfd_create("test") for _ in range(3)) for _ in range(2)]
"""The memory that the agents of two nodes keep; ranks 0 and 1 run on the first."""


class InterruptedStepError(Exception):
    """A rank's step ended in the middle."""


class Trainer:
    """A model with BatchNorm and dropout, and everything else that a script may keep in a State."""

    def __init__(self, *, seed: int = 1, random_seed: int | None = None) -> None:
        torch.manual_seed(seed)
        layers = (torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.4), torch.nn.Linear(8, 1))
        self.model = torch.nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        objects = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        self.state = State(**objects, scaler=self.scaler, samples=0, losses=[], step=0)
        if random_seed is not None:
            torch.manual_seed(random_seed)

    def step(self, fault: str = "") -> None:
        """Do one step, as DDP does it; `fault` names the place where it ends."""
        state = self.state
        for buffer in self.model.buffers():
            dist.broadcast(buffer, 0)
        state.samples += 8  # too early: an interrupted step must not count
        data = torch.Generator().manual_seed(1000 * state.step + dist.get_rank())
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(8, 6, generator=data)).square().mean()
        state.losses.append(round(loss.item(), 6))
        self.scaler.scale(loss).backward()
        self._end_at("forward", fault)
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
        self.scaler.unscale_(self.optimizer)
        self._end_at("backward", fault)
        self.scaler.step(self.optimizer)
        self._end_at("optimizer", fault)
        self.scaler.update()
        self.scheduler.step()
        state.step += 1

    def _end_at(self, place: str, fault: str) -> None:
        if fault == place:
            self.scaler.update(0.5)
            self.scheduler.step()
            raise InterruptedStepError(place)

    def digest(self) -> dict[str, Any]:
        """Return what must be the same, bit for bit, as in a run without interruptions."""
        for buffer in self.model.buffers():
            dist.broadcast(buffer, 0)
        parts = [self.model.state_dict(), self.optimizer.state_dict(), self.scaler.state_dict()]
        values = [self.state.step, self.state.samples, len(self.state.losses), self.scheduler.state_dict()]
        return {"bits": _hash(parts), "values": repr(values), "random": _hash(random_states.capture()["torch"])}


class Rounds:
    """The rounds of one scenario, in this rank's process."""

    def __init__(self, folder: str, scenario: str, rank: int) -> None:
        self._prefix = os.path.join(folder, scenario)  # noqa: PTH118
        self.rank = rank
        self._number = 0

    def begin(self, ranks: tuple[int, ...] = tuple(range(WORLD))) -> bool:
        """Begin the next round with these ranks; return whether this one takes part."""
        self.end()
        self._number += 1
        if self.rank not in ranks:
            return False
        store = dist.FileStore(f"{self._prefix}-{self._number}", len(ranks))
        index = ranks.index(self.rank)
        dist.init_process_group("gloo", store=store, rank=index, world_size=len(ranks), timeout=timedelta(seconds=20))
        return True

    def end(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def train(self, trainer: Trainer, until: int, fault: str = "", at: int = -1) -> None:
        """Take part in a round until a step, or until the fault in the step after `at` on this rank or another."""
        trainer.state.sync()
        try:
            while trainer.state.step < until:
                trainer.step(fault if trainer.state.step == at else "")
        except (InterruptedStepError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "onnection" not in str(error):
                raise
        self.end()


def uninterrupted(rounds: Rounds) -> Any:
    rounds.begin()
    trainer = Trainer(random_seed=100 + rounds.rank)
    rounds.train(trainer, STEPS)
    rounds.begin()
    return trainer.digest()


def interrupted(fault: str, *, seeds_again: bool = False) -> Callable[[Rounds], Any]:
    """Rank 1 ends its third step at this place, and all continue in the next round.

    `seeds_again`: the function begins by seeding its generators, as it did at its first call.
    """

    def scenario(rounds: Rounds) -> Any:
        rounds.begin()
        trainer = Trainer(random_seed=100 + rounds.rank)
        rounds.train(trainer, STEPS, fault if rounds.rank == 1 else "", at=2)
        steps, changing = trainer.state.step, trainer.state.changing
        if seeds_again:
            note_interruption()
            torch.manual_seed(100 + rounds.rank)
        rounds.begin()
        with counted() as calls:
            rounds.train(trainer, STEPS)
        rounds.begin()
        return {**trainer.digest(), "interrupted": [steps, changing], "calls": calls}

    return scenario


def gradients_are_dropped(rounds: Rounds) -> Any:
    rounds.begin()
    trainer = Trainer()
    trainer.state.sync()
    trainer.model(torch.ones(4, 6)).sum().backward()
    trainer.state.sync()
    return [parameter.grad is None for parameter in trainer.model.parameters()]


def joiner(rounds: Rounds) -> Any:
    """Ranks 0 and 1 train; rank 2 joins with a new model and no state."""
    trainer = Trainer(seed=1, random_seed=7) if rounds.rank < 2 else Trainer(seed=9)
    if rounds.begin((0, 1)):
        rounds.train(trainer, 3)
    rounds.begin()
    with counted() as calls:
        trainer.state.sync()
    return {**trainer.digest(), "calls": calls}


def joiners_whose_processes_stay(members: tuple[int, ...]) -> Any:
    """The members train; the other ranks join, with processes that will survive the end of a round."""

    def scenario(rounds: Rounds) -> Any:
        trainer = Trainer(seed=1, random_seed=7) if rounds.rank in members else Trainer(seed=9)
        if rounds.begin(members):
            rounds.train(trainer, 3)
        rounds.begin()
        progress_channel.set_process_survives_round(True)
        places = [parameter.data_ptr() for parameter in trainer.model.parameters()]
        with counted() as calls:
            trainer.state.sync()
        progress_channel.set_process_survives_round(False)
        in_place = places == [parameter.data_ptr() for parameter in trainer.model.parameters()]
        return {**trainer.digest(), "calls": calls, "in place": in_place}

    return scenario


def joiner_with_other_random_states(rounds: Rounds) -> Any:
    trainer = Trainer(random_seed=100 + rounds.rank)
    if rounds.begin((0, 1)):
        rounds.train(trainer, 3)
    rounds.begin()
    before = trainer.digest()["random"]
    trainer.state.sync()
    return [before, trainer.digest()["random"]]


def rollback(rounds: Rounds) -> Any:
    """All ranks go back to step 2 and commit; then rank 2 is replaced by a process without state."""
    rounds.begin()
    trainer = Trainer()
    rounds.train(trainer, 2)
    rounds.begin()
    saved = json.dumps([p.tolist() for p in trainer.model.parameters()])
    rounds.train(trainer, 4)
    with torch.no_grad():
        for parameter, old in zip(trainer.model.parameters(), json.loads(saved), strict=True):
            parameter.copy_(torch.tensor(old))
    trainer.state.step = 2
    trainer.state.commit()
    if rounds.rank == 2:
        trainer = Trainer(seed=9)
    rounds.begin()
    trainer.state.sync()
    return [trainer.state.step, json.dumps([p.tolist() for p in trainer.model.parameters()]) == saved]


def cut_off(rounds: Rounds) -> Any:
    """Rank 2 is cut off at step 1 and commits often; the others continue to step 3, in which they commit once."""
    rounds.begin()
    trainer = Trainer()
    rounds.train(trainer, 1)
    if rounds.begin((0, 1)):
        rounds.train(trainer, 3)
        trainer.state.commit()
    else:
        for _ in range(9):
            trainer.state.commit()
    rounds.begin()
    trainer.state.sync()
    return trainer.state.step


def all_half_changed(rounds: Rounds) -> Any:
    rounds.begin()
    trainer = Trainer()
    rounds.train(trainer, 3, "optimizer", at=0)
    rounds.begin()
    try:
        trainer.state.sync()
    except RuntimeError as error:
        return str(error)
    return "no error"


def all_half_changed_with_a_copy(rounds: Rounds) -> Any:
    rounds.begin()
    trainer = Trainer(random_seed=100 + rounds.rank)
    rounds.train(trainer, 2)
    trainer.state.commit()
    rounds.begin()
    rounds.train(trainer, STEPS, "optimizer", at=3)
    rounds.begin()
    trainer.state.sync()
    step = trainer.state.step
    rounds.train(trainer, STEPS)
    rounds.begin()
    return [step, trainer.digest()]


def new_process_of_the_same_rank(rounds: Rounds) -> Any:
    """All processes end after a commit at step 2, and new ones continue with the memory that their agents kept."""
    progress_channel.channel.state = ChannelState.NO_AGENT
    progress_channel.channel.memory = NODES[rounds.rank // 2]
    rounds.begin()
    trainer = Trainer(random_seed=100 + rounds.rank)
    rounds.train(trainer, 2)
    trainer.state.commit()
    rounds.begin()
    trainer = Trainer(seed=5, random_seed=200 + rounds.rank)
    with counted() as calls:
        rounds.train(trainer, STEPS)
    rounds.begin()
    progress_channel.channel.memory = ()
    return {**trainer.digest(), "calls": calls}


def fine_tuning(rounds: Rounds) -> Any:
    """Ranks 0 and 1 train one layer of a pretrained model; rank 2, which has loaded that model too, joins twice.

    The second time its process will survive the end of a round. In between, all make a commit. Then rank 2 joins once
    more, with another model.
    """
    sent, equal, error = [], [], ""
    for seed, stays in ((0, False), (0, True), (1, True)):
        if rounds.rank == 2 or (seed, stays) == (0, False):
            torch.manual_seed(seed)
            model = torch.nn.Sequential(torch.nn.Linear(256, 256).requires_grad_(False), torch.nn.BatchNorm1d(256))
            model.append(torch.nn.Linear(256, 1))
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            progress_channel.set_process_survives_round(stays)
            state = State(model=model, optimizer=optimizer, frozen_parameters=False)
            progress_channel.set_process_survives_round(False)
        if rounds.begin((0, 1)):
            state.sync()
            model(torch.ones(8, 256)).square().mean().backward()
            optimizer.step()
            state.step += 1
        rounds.begin()
        try:
            state.sync()
        except RuntimeError as raised:
            error = str(raised)
            continue
        state.commit()
        sent.append(internals(state).copies.newest()[1].size)
        equal.append([state.step, _hash([model.state_dict(), optimizer.state_dict()])])
    return {"sent": sent, "equal": equal, "error": error}


def sharded_models(rounds: Rounds) -> Any:
    """Models that FSDP divides among the ranks."""
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer

    rounds.begin()
    divided = ZeroRedundancyOptimizer(torch.nn.Linear(6, 6).parameters(), torch.optim.SGD, lr=0.1)
    second = torch.nn.Sequential(torch.nn.Linear(6, 6))
    fully_shard(second)
    first = torch.nn.Sequential(FullyShardedDataParallel(torch.nn.Linear(6, 6), device_id=torch.device("cpu")))
    unsharded = torch.nn.Linear(6, 6)
    state = State(late=unsharded)
    fully_shard(unsharded)
    return [
        refusal(model=second),
        refusal(model=first),
        refusal(shard=next(second.parameters())),
        error_of(state.commit),
        refusal(optimizer=torch.optim.SGD(second.parameters(), lr=0.1)),
        refusal(optimizer=divided),
    ]


SCENARIOS: dict[str, Callable[[Rounds], Any]] = {
    "uninterrupted": uninterrupted,
    "forward": interrupted("forward", seeds_again=True),
    "backward": interrupted("backward"),
    "optimizer": interrupted("optimizer", seeds_again=True),
    "gradients": gradients_are_dropped,
    "joiner": joiner,
    "joiner stays": joiners_whose_processes_stay((0, 1)),
    "joiners stay": joiners_whose_processes_stay((0,)),
    "joiner random": joiner_with_other_random_states,
    "rollback": rollback,
    "cut off": cut_off,
    "all half changed": all_half_changed,
    "all half changed with a copy": all_half_changed_with_a_copy,
    "new process": new_process_of_the_same_rank,
    "fine-tuning": fine_tuning,
    "sharded": sharded_models,
}


class PerRankSampler:
    """A sampler that saves its own rank's position, as those of torchdata do."""

    num_replicas, rank = 4, 1

    def state_dict(self) -> dict[str, int]:
        return {"position": 7}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


class PlainObject:
    """An object with a state that a test chooses."""

    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class StatefulLoader(PerRankSampler):
    """A class of torchdata."""

    __module__ = "torchdata.stateful_dataloader.stateful_dataloader"


class DerivedLoader(StatefulLoader):
    """A user's class that is derived from it."""

    __module__ = __name__
    num_replicas = rank = property()  # it has neither


class PreparedLoader(PlainObject):
    """What `accelerator.prepare` returns for it."""

    base_dataloader = StatefulLoader()


class WrappedOptimizer(torch.optim.Optimizer):  # type: ignore[misc]
    """As that of `accelerator.prepare`: a subclass without what the base class sets up."""

    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = []


class Pair(NamedTuple):
    first: int
    second: int


class Counting(torch.nn.Module):  # type: ignore[misc]
    """Counts its calls in its extra state, and in a buffer that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = [0]
        self.seen: Any
        self.register_buffer("seen", torch.zeros(0))

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]

    def forward(self) -> None:
        self.calls[0] += 1
        self.seen = torch.cat([self.seen, torch.ones(1)])


def refusal(**parts: Any) -> str:
    """Return the error of a State with these parts; empty if it is accepted."""
    return error_of(lambda: State(**parts))


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refused_parts() -> dict[str, str]:
    import numpy as np
    from torch.utils.data import DataLoader, DistributedSampler

    late = State(best=0.0)
    late.best = np.float64(1.5)
    return {
        "numpy scalar": refusal(best=np.float64(1.5)),
        "numpy array": refusal(seen={"x": [np.zeros(2)]}),
        "late numpy scalar": error_of(late.commit),
        "object": refusal(best=object()),
        "class": refusal(model=torch.nn.Linear),
        "data loader": refusal(loader=DataLoader([1])),
        "set": refusal(seen={1, 2}),
        "key": refusal(seen={1.5: 0}),
        "inside an object": refusal(tracker=PlainObject(best=[np.float32(1)])),
        "named tuple inside an object": refusal(tracker=PlainObject(best=[Pair(1, 2)])),
        "defaultdict inside an object": refusal(tracker=PlainObject(best={"x": defaultdict(int)})),
        "sparse": refusal(mask=torch.eye(2).to_sparse()),
        "quantized": refusal(mask=torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)),
        "meta": refusal(mask=torch.empty(2, device="meta")),
        "commit": refusal(commit=1),
        "changing": refusal(changing=1),
        "private": refusal(_live=1),
        "step": refusal(step=-1),
        "late step": error_of(lambda: setattr(late, "step", np.int64(1))),
        "position of a rank": refusal(sampler=PerRankSampler()),
        "loader of torchdata": refusal(loader=DerivedLoader()),
        "prepared loader of torchdata": refusal(loader=PreparedLoader()),
        "trained tensor": refusal(seen={"w": torch.nn.Parameter(torch.ones(2))}),
        "subclass of dict": refusal(seen=[defaultdict(int)]),
        "named tuple": refusal(seen=Pair(1, 2)),
        "without a shape": refusal(model=torch.nn.LazyLinear(1)),
        "wrapped optimizer": refusal(optimizer=WrappedOptimizer()),
        "minutes": refusal(save_minutes=-5, path="x"),
        "minutes without a path": refusal(save_minutes=5),
        "result of a computation": refusal(loss=torch.ones(2, requires_grad=True).sum()),
        "distributed sampler": refusal(sampler=DistributedSampler(range(8), num_replicas=2, rank=1)),
        "all kinds": refusal(a=[1, None], b={"x": (True, 2.5)}, c=torch.ones(0, 2, dtype=torch.bfloat16)),
    }


class QueueDevice:
    """An accelerator whose work is done when it is synchronized."""

    def __init__(self) -> None:
        self.work: list[Callable[[], object]] = []

    def synchronize(self) -> None:
        while self.work:
            self.work.pop(0)()


def queued_work() -> dict[str, Any]:
    """Commit while work that changes the model is queued, and load the copy in another process."""
    device = QueueDevice()
    original, devices.module_in_use = devices.module_in_use, lambda torch: device
    progress_channel.channel.state = ChannelState.NO_AGENT
    progress_channel.channel.memory = tuple(os.memfd_create("test") for _ in range(3))
    model = torch.nn.Linear(1, 1, bias=False)
    state = State(model=model)
    device.work = [lambda: torch.nn.init.constant_(model.weight, 5.0)]
    state.commit()
    next_process = torch.nn.Linear(1, 1, bias=False)
    State(model=next_process).sync()
    devices.module_in_use, progress_channel.channel.memory = original, ()
    return {"committed": next_process.weight.item()}


def milestones() -> dict[str, str]:
    """The type of a scheduler's milestones in another process, and after an interruption."""
    progress_channel.channel.state = ChannelState.NO_AGENT
    progress_channel.channel.memory = tuple(os.memfd_create("test") for _ in range(3))

    def state_with_scheduler() -> tuple[State, Any]:
        optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), 0.1)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2])
        return State(scheduler=scheduler), scheduler

    state_with_scheduler()[0].commit()
    state, scheduler = state_with_scheduler()
    state.sync()
    found = {"loaded": type(scheduler.milestones).__name__}
    internals(state).live.restore()
    progress_channel.channel.memory = ()
    return found | {"interrupted": type(scheduler.milestones).__name__}


def broadcast_devices() -> dict[str, str]:
    """Which of eight GPUs the rank with LOCAL_RANK 3 uses."""
    originals = torch.cuda.current_device, torch.cuda.device_count
    gpu, cpu = torch.device("cuda", 5), torch.device("cpu")
    os.environ["LOCAL_RANK"] = "3"

    def chosen(current: int, group: Any, parts: list[Any], count: int = 8) -> str:
        torch.cuda.current_device, torch.cuda.device_count = lambda: current, lambda: count
        return str(group_device.broadcast_device(group, parts))

    found = {
        "of the group": chosen(1, gpu, [torch.device("cuda", 6)]),
        "of the model": chosen(1, None, [cpu, gpu]),
        "set by the script": chosen(5, None, [cpu]),
        "never set": chosen(0, None, [cpu]),
        "one visible GPU": chosen(0, None, [cpu], count=1),
    }
    original = torch.cuda.is_initialized, torch.cuda.get_rng_state, torch.cuda.set_rng_state
    chosen(0, None, [cpu])
    torch.cuda.is_initialized, torch.cuda.get_rng_state = lambda: True, lambda device: f"cuda:{device}"
    torch.cuda.set_rng_state = lambda state, device: found.update({"restored": f"{state} on cuda:{device}"})
    captured = random_states.capture()
    random_states.restore({"cuda": captured["cuda"]})
    torch.cuda.is_initialized, torch.cuda.get_rng_state, torch.cuda.set_rng_state = original
    torch.cuda.current_device, torch.cuda.device_count = originals
    del os.environ["LOCAL_RANK"]
    return found


def sections() -> dict[str, Any]:
    """What an interrupter sees at each point of a step."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state, seen = State(optimizer=optimizer), []

    def look() -> None:
        seen.append([state.changing, guard.inside])

    look()
    optimizer.step()
    optimizer.step()
    look()
    state.step += 1
    look()
    optimizer.step()
    state.commit()
    look()
    optimizer.step()
    other = State(optimizer=optimizer)
    look()
    optimizer.step()
    seen.append([state.changing, other.changing, guard.inside])
    other.step += 1
    look()
    return {"seen": seen}


def planned_ends() -> dict[str, Any]:
    """Which State a planned end commits, also after a new round has dropped the callbacks."""
    committed: list[str] = []
    first, second = State(name="first"), State(name="second")
    for state in (first, second):
        vars(state)["commit"] = lambda state=state: committed.append(state.name)
    starts: list[Callable[[], None]] = [
        lambda: None,
        first.sync,
        lambda: progress_channel.begin_round(0),
        second.sync,
    ]
    for begin in starts:
        begin()
        for save in progress_channel.channel.callbacks:
            save()
        committed.append("-")
    return {"committed": committed}


def values_changed_in_place() -> dict[str, Any]:
    """A tensor that an interrupted step has changed in place: there is no copy, so the live state is incomplete."""
    state = State(mask=torch.zeros(2), table={"x": [1]})
    state.commit()
    state.table["x"].append(2)
    state.sync()
    table = state.table
    state.mask += 1
    complete = internals(state).live.complete
    state.sync()
    return {"table": table, "complete": complete, "mask": state.mask.tolist()}


def plain_tensor_of_a_device() -> dict[str, Any]:
    """A plain tensor that was committed on the CPU comes back on the device where the script has it by then."""
    found = {}
    for name, keep in (("alone", lambda tensor: tensor), ("inside", lambda tensor: {"x": [tensor]})):
        parts: dict[str, Any] = {name: keep(torch.ones(2))}
        state = State(**parts)
        state.commit()
        setattr(state, name, keep(torch.zeros(2, device="meta")))
        state.sync()
        found[name] = str(getattr(state, name))
    return found


def forward_passes() -> dict[str, Any]:
    """A forward pass that is not followed by a step is undone, whatever it has changed in the modules."""
    model, scaler = Counting(), torch.amp.GradScaler("cpu", enabled=False)
    state = State(model=model, scaler=scaler)
    state.sync()
    model()
    state.step += 1
    model()
    state.sync()
    return {"calls": model.calls, "seen": model.seen.tolist()}


def file_of_version_0_1_0() -> dict[str, Any]:
    """Load a file of the old format, and save over it."""
    with tempfile.NamedTemporaryFile() as file:
        State(path=file.name, best=4, step=1000).save()
        found = read_file_header(file.name)
        old = struct.pack("=8sqqq", b"EJSTATE1", 1000, found.json_size, found.size).ljust(64, b"\0")
        os.pwrite(os.open(file.name, os.O_WRONLY), old, 0)
        state = State(path=file.name, best=0)
        state.sync()
        loaded = [state.step, state.best]
        state.step = 7
        state.save()
        again = State(path=file.name, best=0)
        again.sync()
        return {"loaded": loaded, "saved": again.step}


def before_the_first_sync() -> dict[str, Any]:
    """A script that loads its own checkpoint first: `sync` without a copy changes nothing."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = State(optimizer=optimizer, best=0)
    state.step = 7
    state.best = 3
    optimizer.param_groups[0]["lr"] = 0.5
    state.sync()
    return {"step": state.step, "best": state.best, "lr": optimizer.param_groups[0]["lr"]}


ALONE: dict[str, Callable[[], dict[str, Any]]] = {
    "refused": refused_parts,
    "queued": queued_work,
    "milestones": milestones,
    "devices": broadcast_devices,
    "sections": sections,
    "planned ends": planned_ends,
    "in place": values_changed_in_place,
    "forward passes": forward_passes,
    "device of a value": plain_tensor_of_a_device,
    "old file": file_of_version_0_1_0,
    "first sync": before_the_first_sync,
}


class counted:  # noqa: N801  (a context manager with a result)
    """Count what this rank does with blocks: sends, receives or discards them, and loads them into its objects."""

    def __enter__(self) -> dict[str, int]:
        names = {"send": Exchange, "receive": Exchange, "receive_pieces": Exchange, "discard": Exchange, "_load": State}
        self._saved = {(owner, name): getattr(owner, name) for name, owner in names.items()}
        calls: dict[str, int] = {}
        for (owner, name), method in self._saved.items():
            setattr(owner, name, _counting(calls, name, method))
        return calls

    def __exit__(self, *_: object) -> None:
        for (owner, name), method in self._saved.items():
            setattr(owner, name, method)


def _counting(calls: dict[str, int], name: str, method: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        calls[name] = calls.get(name, 0) + 1
        return method(*args, **kwargs)

    return call


def _hash(value: Any) -> str:
    return hashlib.sha256(_bytes(value)).hexdigest()[:16]


def _bytes(value: Any) -> bytes:
    if isinstance(value, torch.Tensor):
        return (
            bytes(value.detach().contiguous().view(torch.uint8).flatten().tolist())
            if value.dim()
            else _bytes(value.reshape(1))
        )
    if isinstance(value, dict):
        return b"".join(repr(key).encode() + _bytes(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return b"".join(_bytes(item) for item in value)
    return repr(value).encode()


def _rank(folder: str, rank: int, results: Any) -> None:
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank % 2)
    found: dict[str, Any] = {}
    for name, scenario in SCENARIOS.items():
        rounds = Rounds(folder, name.replace(" ", "_"), rank)
        try:
            found[name] = scenario(rounds)
        except Exception:
            found[name] = traceback.format_exc()
        rounds.end()
    results.put((rank, found))


def main(folder: str) -> None:
    Trainer()  # torch imports much at its first optimizer; the ranks are forks and have it
    forks = multiprocessing.get_context("fork")
    results = forks.Queue()
    ranks = [forks.Process(target=_rank, args=(folder, rank, results)) for rank in range(WORLD)]
    for process in ranks:
        process.start()
    found = dict(results.get(timeout=60) for _ in ranks)
    alone = {name: scenario() for name, scenario in ALONE.items()}
    print(json.dumps(alone | {name: [found[rank][name] for rank in range(WORLD)] for name in SCENARIOS}))


if __name__ == "__main__":
    main(sys.argv[1])
