"""Four ranks (processes with gloo) that go through several rounds: `python sharded_state_ranks.py FOLDER`.

Prints one line of JSON: for each scenario, what each rank returned. Each rank has the memory that its agent would keep;
a lost node is one whose memory is empty. A round ends as in a restartable function: its connections are broken.
"""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from elasticjob.inprocess._groups.process_groups import ProcessGroups
from elasticjob.training import progress_channel
from elasticjob.training.progress_channel import ChannelState
from elasticjob.training.sharded.shard_copies import ShardCopier
from elasticjob.training.sharded.shard_memory import ShardBuffers
from elasticjob.training.sharded.sharded_state import ShardedState, wait_for_last_commit

WORLD = 4
ALL = tuple(range(WORLD))
MEMORY = [tuple(os.memfd_create("test") for _ in range(7)) for _ in ALL]
"""What the agent of each rank keeps."""


class InterruptedCommitError(Exception):
    """A rank ended in the middle of a commit."""


class Network(torch.nn.Module):  # type: ignore[misc]
    """Layers whose sizes no world size divides, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 7)
        self.norm = torch.nn.LayerNorm(7)
        self.last = torch.nn.Linear(7, 5)
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("nothing", torch.zeros(0))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.last(torch.tanh(self.norm(self.first(inputs))))
        return outputs


class Trainer:
    """The objects of one round."""

    def __init__(self, world: int, *, replicas: int = 1, sharded: bool = True, seed: int = 1) -> None:
        torch.manual_seed(seed)
        self.model = Network()
        if sharded:
            shape = (replicas, world // replicas) if replicas > 1 and world % replicas == 0 else (world,)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
            fully_shard(self.model.first, mesh=mesh)
            fully_shard(self.model, mesh=mesh, reshard_after_forward=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)

    def keep(self) -> ShardedState:
        parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        self.state = ShardedState(**parts, step=0, samples=[], mask=torch.zeros(3))
        return self.state

    def step(self, number: int, rank: int = 0, world: int = 1) -> float:
        """Do a step with this rank's part of 12 samples; return the loss of all samples."""
        data = torch.randn(12, 6, generator=torch.Generator().manual_seed(number))[rank::world]
        self.optimizer.zero_grad()
        loss = self.model(data).square().mean()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        mean = loss.detach().clone()
        if world > 1:
            dist.all_reduce(mean)
        return float(round(mean.item() / world, 6))

    def train(self, steps: int, *, own_buffer: bool = False) -> list[float]:
        """Do and commit steps. `own_buffer`: in the end, a buffer differs between ranks."""
        losses = []
        for _ in range(steps):
            losses.append(self.step(self.state.step, dist.get_rank(), dist.get_world_size()))
            self.model.seen.add_(dist.get_rank() + 1 if own_buffer else 1)
            self.state.samples = [*self.state.samples, self.state.step]
            self.state.mask = self.state.mask + 1
            self.state.step += 1
            self.state.commit()
        return losses

    def wait_copies(self) -> None:
        """Wait until all copies of the last commit are made."""
        wait_for_last_commit(self.state)

    def digest(self) -> dict[str, Any]:
        """Return what must be the same before and after a change of the world."""
        tensors = [*self.model.parameters(), *(t for s in self.optimizer.state.values() for t in s.values())]
        full = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in tensors]
        state = self.state
        values = [state.step, state.samples, state.mask.tolist(), self.scheduler.get_last_lr()]
        return {"tensors": len(full), "bits": _hash(full), "values": values}


class Rounds:
    """The rounds of one scenario, in this rank's process."""

    def __init__(self, folder: str, scenario: str, rank: int) -> None:
        self._prefix = os.path.join(folder, scenario.replace(" ", "_"))  # noqa: PTH118
        self.rank = rank
        self._number = 0
        self._groups = ProcessGroups()
        self._watch: Any = None
        progress_channel.channel.state = ChannelState.NO_AGENT
        progress_channel.channel.memory = MEMORY[rank]
        self.lose(self.rank)

    def begin(self, ranks: tuple[int, ...] = ALL, *, per_node: int = 1) -> bool:
        """Begin the next round with these ranks, in this order; return whether this one takes part."""
        self.end()
        self._number += 1
        if self.rank not in ranks:
            return False
        index = ranks.index(self.rank)
        os.environ["GROUP_RANK"] = str(index // per_node)
        self._watch = self._groups.watch()
        self._watch.__enter__()
        store = dist.FileStore(f"{self._prefix}-{self._number}", len(ranks))
        dist.init_process_group("gloo", store=store, rank=index, world_size=len(ranks), timeout=timedelta(seconds=40))
        return True

    def end(self) -> None:
        if self._watch is not None:
            self._watch.__exit__(None, None, None)
            self._watch = None
            self._groups.leave()

    def lose(self, *ranks: int) -> None:
        """Forget the memory of nodes, and of this process if it is among them."""
        if self.rank in ranks:
            for descriptor in MEMORY[self.rank]:
                os.ftruncate(descriptor, 0)


def changing_worlds(replicas: int) -> Callable[[Rounds], Any]:
    """Rank 2 is lost, and a new one joins later."""

    def scenario(rounds: Rounds) -> Any:
        found: list[Any] = []
        for ranks in (ALL, (0, 1, 3), (1, 0, 2, 3)):
            if rounds.begin(ranks):
                trainer = Trainer(len(ranks), replicas=replicas, seed=len(found))
                trainer.keep()
                with opened_files() as files:
                    restored = trainer.state.sync()
                begin, losses = trainer.digest(), trainer.train(3)
                trainer.wait_copies()
                found.append([restored, begin, losses, trainer.digest(), files])
            rounds.lose(2)
        return found

    return scenario


def nodes_lost(*lost: int, per_node: int = 1) -> Callable[[Rounds], Any]:
    """Nodes are lost after two commits and the copies."""

    def scenario(rounds: Rounds) -> Any:
        rounds.begin(per_node=per_node)
        trainer = Trainer(WORLD)
        trainer.keep().sync()
        trainer.train(2)
        trainer.wait_copies()
        before = trainer.digest()
        rounds.lose(*lost)
        left = tuple(rank for rank in ALL if rank not in lost)
        if not rounds.begin(left, per_node=per_node):
            return None
        trainer = Trainer(len(left), seed=2)
        with warnings() as texts:
            restored = trainer.keep().sync()
        return [restored, trainer.state.step, trainer.digest() == before, texts]

    return scenario


def lost_one_after_the_other(rounds: Rounds) -> Any:
    """Rank 2 is lost, then rank 1, before any step is done in between."""
    rounds.begin()
    trainer = Trainer(WORLD)
    trainer.keep().sync()
    trainer.train(2)
    trainer.wait_copies()
    before = trainer.digest()
    rounds.lose(2)
    if rounds.begin((0, 1, 3)):
        trainer = Trainer(3, seed=2)
        trainer.keep().sync()
        trainer.wait_copies()
    rounds.lose(1)
    return _continued(rounds, before, (0, 3))


def torn_commit(rounds: Rounds) -> Any:
    """Rank 1 ends while it writes the third commit."""
    rounds.begin()
    trainer = Trainer(WORLD)
    trainer.keep().sync()
    trainer.train(2)
    trainer.wait_copies()
    before, finish = trainer.digest(), ShardBuffers.finish

    def end_in_the_middle(*_: Any) -> None:
        raise InterruptedCommitError

    if rounds.rank == 1:
        ShardBuffers.finish = end_in_the_middle  # type: ignore[method-assign, assignment]
    try:
        trainer.train(1)
    except InterruptedCommitError:
        ShardBuffers.finish = finish  # type: ignore[method-assign]
    return [*_continued(rounds, before), trainer.state.step]


def copies_not_made(rounds: Rounds) -> Any:
    """Node 2 is lost after the third commit, before any copy of it is made."""
    rounds.begin()
    trainer = Trainer(WORLD)
    trainer.keep().sync()
    trainer.train(2)
    trainer.wait_copies()
    before, copy = trainer.digest(), ShardCopier.exchange

    def lost(*_: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    ShardCopier.exchange = lost  # type: ignore[method-assign, assignment]
    trainer.train(1)
    errors = _errors_of(trainer.state.commit)
    ShardCopier.exchange = copy  # type: ignore[method-assign]
    rounds.lose(2)
    return [*_continued(rounds, before, (0, 1, 3)), errors]


def copy_that_never_ends(rounds: Rounds) -> Any:
    """A copy waits for ever though the connections of its round are broken."""
    rounds.begin()
    trainer = Trainer(WORLD)
    trainer.keep().sync()
    trainer.train(2)
    trainer.wait_copies()
    copy, begun = ShardCopier.exchange, threading.Event()

    def wait(*_: Any) -> None:
        begun.set()
        threading.Event().wait()

    ShardCopier.exchange = wait  # type: ignore[method-assign, assignment]
    trainer.train(1)
    begun.wait()
    ShardCopier.exchange = copy  # type: ignore[method-assign]
    return _continued(rounds, trainer.digest())


def _continued(rounds: Rounds, before: Any, ranks: tuple[int, ...] = ALL) -> list[Any]:
    """Begin the next round; return the step, and whether the state is the one `before`."""
    if not rounds.begin(ranks):
        return []
    trainer = Trainer(len(ranks), seed=2)
    restored = trainer.keep().sync()
    return [restored, trainer.state.step, trainer.digest() == before]


def own_values(rounds: Rounds) -> Any:
    """At the same world size, buffers and random states that differ between ranks stay what they were."""
    found: list[Any] = []
    for _ in range(2):
        rounds.begin()
        trainer = Trainer(WORLD)
        torch.manual_seed(100 + rounds.rank)
        trainer.keep().sync()
        if not found:
            trainer.train(1, own_buffer=True)
            trainer.wait_copies()
        found.append([trainer.model.seen.tolist(), torch.rand(1).item()])
    return found


def joiner_random(*, alike: bool) -> Callable[[Rounds], Any]:
    """Ranks 0 to 2 train; rank 3 joins, without random states of its own."""

    def scenario(rounds: Rounds) -> Any:
        numbers = []
        for ranks in ((0, 1, 2), ALL):
            if rounds.begin(ranks):
                trainer = Trainer(len(ranks))
                torch.manual_seed(7 if alike and rounds.rank < 3 else 100 + rounds.rank)
                trainer.keep().sync()
                trainer.state.commit()
                trainer.wait_copies()
                numbers.append(torch.rand(1).item())
        return numbers

    return scenario


def different_commits(rounds: Rounds) -> Any:
    rounds.begin()
    trainer = Trainer(WORLD)
    trainer.keep().sync()
    if rounds.rank == 1:
        trainer.state.step += 1
    trainer.state.commit()
    return _errors_of(trainer.state.commit)


def another_model(rounds: Rounds) -> Any:
    rounds.begin()
    trainer = Trainer(WORLD)
    trainer.keep().sync()
    trainer.train(1)
    rounds.begin()
    trainer = Trainer(WORLD, sharded=False)
    trainer.model.more = torch.nn.Linear(2, 2)
    missing = _errors_of(trainer.keep().sync)
    rounds.begin()
    trainer = Trainer(WORLD, sharded=False)
    trainer.model.last = torch.nn.Linear(9, 9)
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    return [missing, _errors_of(trainer.keep().sync)]


def planned_end(rounds: Rounds) -> Any:
    """All ranks stop at step 2 without a commit of their own; node 3 leaves."""
    rounds.begin()
    trainer = Trainer(WORLD)
    trainer.keep().sync()
    trainer.train(1)
    trainer.step(trainer.state.step, rounds.rank, WORLD)
    trainer.state.step += 1
    for save in progress_channel.channel.callbacks:
        save()
    before = trainer.digest()
    rounds.lose(3)
    return _continued(rounds, before, (0, 1, 2))


def refused_parts(rounds: Rounds) -> Any:
    rounds.begin()
    trainer = Trainer(WORLD)
    first = torch.nn.Sequential(FullyShardedDataParallel(torch.nn.Linear(6, 6), device_id=torch.device("cpu")))
    other = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
    cases: dict[str, dict[str, Any]] = {
        "FSDP1": {"model": first},
        "meta": {"model": torch.nn.Linear(2, 2, device="meta")},
        "sum of the ranks": {"model": _with_buffer(_partial())},
        "ShardedTensor": {"model": _with_buffer(sharded_tensor.zeros(_chunks(), 8, 2))},
        "other optimizer": {"model": trainer.model, "optimizer": other},
        "extra state": {"model": ExtraState()},
        "object": {"best": object()},
        "name": {"commit": 1},
        "option of State": {"save_minutes": 10},
        "shard as a value": {"shard": trainer.model.last.weight},
    }
    found = {name: _errors_of(ShardedState, **parts) for name, parts in cases.items()}
    return {**found, "no sync": _errors_of(trainer.keep().commit)}


def _with_buffer(tensor: torch.Tensor) -> torch.nn.Module:
    module = torch.nn.Module()
    module.register_buffer("kept", tensor)
    return module


def _partial() -> torch.Tensor:
    return DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (WORLD,)), [Partial()])


def fsdp_and_tensor_parallelism(rounds: Rounds) -> Any:
    """The first layer's weight is sharded along the same dimension by both. Two of four ranks are lost and replaced."""
    found: list[Any] = []
    for number, (ranks, shape) in enumerate([(ALL, (2, 2)), ((0, 1), (1, 2)), (ALL, (4, 1)), (ALL, (2, 2))]):
        if not rounds.begin(ranks, per_node=2):
            found.append(None)
            continue
        trainer = TensorParallelTrainer(shape, seed=number)
        restored = trainer.keep().sync()
        begin = trainer.digest()
        losses = [trainer.step_of_replica() for _ in range(2)]
        trainer.wait_copies()
        found.append([restored, begin, losses, trainer.digest()])
        if number == 0:
            rounds.lose(2, 3)
    return found


class TensorParallelTrainer(Trainer):
    """FSDP2 over tensor parallelism."""

    def __init__(self, shape: tuple[int, int], seed: int = 1) -> None:
        super().__init__(1, sharded=False, seed=seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Tanh(), torch.nn.Linear(10, 5))
        self.mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "model"))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(self.model, self.mesh["model"], plan)
        fully_shard(self.model[0], mesh=self.mesh["data"])
        fully_shard(self.model, mesh=self.mesh["data"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)

    def step_of_replica(self) -> float:
        """Do and commit a step, with this replica's part of the samples."""
        data = self.mesh["data"]
        loss = self.step(self.state.step, data.get_local_rank(), data.size())
        self.state.step += 1
        self.state.commit()
        # `step` has added up the losses of all ranks, of each replica several times, unless there is one replica.
        return round(loss * data.size() / dist.get_world_size(), 6) if data.size() > 1 else loss


def tensors_of_one_rank(*, buffer: str) -> Callable[[Rounds], Any]:
    """A tensor that is no DTensor differs between ranks; then a rank is lost."""

    def scenario(rounds: Rounds) -> Any:
        found = []
        for ranks in (ALL, (0, 1, 3)):
            if rounds.begin(ranks):
                trainer = Trainer(len(ranks))
                if buffer == "statistics":
                    trainer.model.statistics = torch.nn.BatchNorm1d(2)
                state = trainer.keep()
                found.append(_errors_of(state.sync))
                if buffer == "value":
                    state.mask = torch.full((3,), float(rounds.rank))
                elif buffer == "statistics":
                    trainer.model.statistics.running_mean.fill_(rounds.rank)
                else:
                    trainer.model.seen.fill_(rounds.rank)
                if not found[1:]:
                    state.commit()
                    trainer.wait_copies()
            rounds.lose(2)
        return found

    return scenario


def _chunks() -> ChunkShardingSpec:
    return ChunkShardingSpec(dim=0, placements=[f"rank:{rank}/cpu" for rank in range(WORLD)])


class ExtraState(torch.nn.Module):  # type: ignore[misc]
    """A module with a state of any kind."""

    def get_extra_state(self) -> object:
        return object()


SCENARIOS: dict[str, Callable[[Rounds], Any]] = {
    "FSDP2": changing_worlds(1),
    "HSDP": changing_worlds(2),
    "one lost": nodes_lost(2),
    "every other lost": nodes_lost(1, 3),
    "neighbors lost": nodes_lost(1, 2),
    "node of two lost": nodes_lost(2, 3, per_node=2),
    "lost one after the other": lost_one_after_the_other,
    "torn commit": torn_commit,
    "copies not made": copies_not_made,
    "copy that never ends": copy_that_never_ends,
    "own values": own_values,
    "own buffer": tensors_of_one_rank(buffer="buffer"),
    "own value": tensors_of_one_rank(buffer="value"),
    "own statistics": tensors_of_one_rank(buffer="statistics"),
    "FSDP and tensor parallelism": fsdp_and_tensor_parallelism,
    "joiner random": joiner_random(alike=False),
    "joiner random alike": joiner_random(alike=True),
    "different commits": different_commits,
    "another model": another_model,
    "planned end": planned_end,
    "refused": refused_parts,
}


def tensor_parallel_reference() -> list[float]:
    """Return the losses of one process with the layers of the TensorParallelTrainer."""
    trainer = Trainer(1, sharded=False, seed=0)
    trainer.model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Tanh(), torch.nn.Linear(10, 5))
    trainer.optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=0.1)
    trainer.scheduler = torch.optim.lr_scheduler.ExponentialLR(trainer.optimizer, 0.9)
    return [trainer.step(number) for number in range(8)]


def reference() -> list[float]:
    """Return the losses of one process without sharding."""
    trainer = Trainer(1, sharded=False, seed=0)
    return [trainer.step(number) for number in range(9)]


@contextmanager
def opened_files() -> Iterator[list[str]]:
    """Collect the files that this process opens, except those of Python modules and of the kernel."""
    found: list[str] = []
    _open_files.append(found)
    yield found
    _open_files.remove(found)


_open_files: list[list[str]] = []


def _note_open(event: str, arguments: Any) -> None:
    if event == "open" and _open_files:
        path = str(arguments[0])
        if not path.startswith(("/proc/", "/sys/")) and ".py" not in path and ".so" not in path:
            _open_files[-1].append(path)


@contextmanager
def warnings() -> Iterator[list[str]]:
    """Collect the warnings of elasticjob."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("elasticjob")
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)


def _errors_of(function: Callable[..., Any], **arguments: Any) -> str:
    """Return the error of a call; empty if there is none."""
    try:
        function(**arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _hash(tensors: list[Any]) -> str:
    text = "".join(repr(tensor.detach().double().tolist()) for tensor in tensors)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _rank(folder: str, rank: int, results: Any) -> None:
    torch.set_num_threads(1)
    sys.addaudithook(_note_open)
    found: dict[str, Any] = {
        "reference": reference(),
        "tensor parallel reference": tensor_parallel_reference(),
    }  # here: a process that has run autograd must not fork
    for name, scenario in SCENARIOS.items():
        rounds = Rounds(folder, name, rank)
        try:
            found[name] = scenario(rounds)
        except Exception:
            found[name] = traceback.format_exc()
            print(f"rank {rank}, {name}: {found[name]}", file=sys.stderr, flush=True)  # the other ranks may hang
        rounds.end()
    results.put((rank, found))


def main(folder: str) -> None:
    torch.optim.AdamW([torch.zeros(1)])  # torch imports much at its first optimizer; the ranks are forks and have it
    forks = multiprocessing.get_context("fork")
    results = forks.Queue()
    ranks = [forks.Process(target=_rank, args=(folder, rank, results)) for rank in range(WORLD)]
    for process in ranks:
        process.start()
    found = dict(results.get(timeout=250) for _ in ranks)
    print(
        json.dumps(
            {
                name: [found[rank][name] for rank in ALL]
                for name in ("reference", "tensor parallel reference", *SCENARIOS)
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
