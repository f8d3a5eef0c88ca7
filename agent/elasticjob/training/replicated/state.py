"""`elasticjob.State`: the state of a DDP training loop, kept in host memory across rounds."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, SupportsFloat, SupportsIndex

from elasticjob._runtime.contract.names import PRESTART_ROUND, Env
from elasticjob._runtime.contract.snapshot_format import state_file
from elasticjob._runtime.contract.snapshot_format.commit_sequence import CommitSequence
from elasticjob._runtime.contract.snapshot_format.state_block import ABSENT, NO_STEP, BlockHeader
from elasticjob._runtime.contract.snapshot_format.state_sources import (
    NO_VERSION,
    AvailableStates,
    Transfer,
    Version,
    choose_transfer,
    equal_generators,
)
from elasticjob._runtime.system.memory_file import memory_file
from elasticjob._runtime.system.process_end import end_outdated_process
from elasticjob.training import progress_channel, random_states, state_exchange
from elasticjob.training.devices import synchronize_device
from elasticjob.training.random_states import GENERATORS
from elasticjob.training.replicated.changes.frozen_parameters import FrozenParameters
from elasticjob.training.replicated.copies.background_copy import BackgroundCopy
from elasticjob.training.replicated.copies.copy_writer import CopyWriter, PackedState
from elasticjob.training.replicated.current_state import CurrentState, StateInternals
from elasticjob.training.replicated.live.live_block import LiveBlock, Receive, receive_into
from elasticjob.training.replicated.live.live_state import LiveState
from elasticjob.training.replicated.live.rank_memory import RankMemory
from elasticjob.training.replicated.lost_steps import report_change, report_lost_steps
from elasticjob.training.replicated.rank_random_states import RankRandomStates
from elasticjob.training.replicated.state_arguments import checked_minutes, checked_step
from elasticjob.training.replicated.state_transfer import Loaded, transfer_state
from elasticjob.training.snapshot_values.node_copies import COPIES, NodeCopies
from elasticjob.training.snapshot_values.state_tree import PackedTree
from elasticjob.training.state_exchange import Exchange
from elasticjob.training.state_parts import check_values, on_device_of, split_parts
from elasticjob.training.update_guard import guard


class State:
    """Model, optimizer and other training state, with the number of steps done.

    This is `elasticjob.State`. `elasticjob.inprocess.State` is another class: a rank's place among the others.

    `commit` copies the state to memory of this pod that outlives the process. `sync`, at the start of every round,
    brings all ranks to the newest state of any rank or pod. When a round ends on plan, all ranks commit at its last
    step; in a process that stays, the objects keep the state instead, and are copied when the process ends. Every rank
    must hold the same state, as under DDP: the first worker of each pod keeps the copy for all.

    Objects with `state_dict` and `load_state_dict` are saved and restored by these methods, and samplers with
    `set_epoch` by their epoch. Everything else must be a plain value (number, text, list, dict, tensor). Plain values
    are attributes of the State.

    In a process that survives the end of a round, the objects themselves hold the newest state, unless the round ended
    between an optimizer's step and the assignment of `step`. Assign `step` after everything else that belongs to the
    step: `sync` returns plain values, schedulers, buffers and random states to what they were at that assignment or at
    the last `commit`, whichever was later.

    Random states: each rank keeps its own (Python, NumPy, torch). A rank that has none for the state that it restores,
    such as one in a new pod, gets the states of the others where these are equal, as after equal seeds. Otherwise it
    gets a seed derived from the State's (torch's initial seed), its rank, and the state's sequence number and step.

    Order of calls: create it, create the process group, `sync`, then `commit` or `save` at any time between two steps.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> state = elasticjob.State(model=model, optimizer=optimizer, epoch=0)
        >>> state.sync()
        >>> while state.step < 3:
        ...     model(torch.ones(1, 2)).sum().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        ...     state.step += 1
        >>> state.commit()
    """

    def __init__(
        self,
        *,
        step: int = 0,
        path: str | os.PathLike[str] | None = None,
        save_minutes: float | None = None,
        random_states: bool = True,
        frozen_parameters: bool = True,
        **parts: Any,
    ) -> None:
        """Check all parts.

        Args:
            step: Number of steps done before.
            path: File to which an agent saves the state at the end of its job or pod. It is loaded if it is newer than
                all copies in memory. None: no file.
            save_minutes: Also save every so many minutes while training continues.
            random_states: Keep them. False if the script seeds its generators itself at each step.
            frozen_parameters: Keep parameters that need no gradient. False if the script loads the same ones in every
                process, such as those of a pretrained model.
            parts: Objects and plain values by name.

        Raises:
            TypeError: A part cannot be kept.
            ValueError: A part's name is reserved, `step` is negative, or `save_minutes` is not above 0 or has no path.
        """
        self.path = os.path.abspath(path) if path is not None else None  # noqa: PTH100
        self._step = checked_step(step)
        self._save_minutes = checked_minutes(save_minutes, path)
        self._sequence = CommitSequence()
        memory, local_rank = progress_channel.node_memory(), int(os.environ.get("LOCAL_RANK", "0"))
        self._copies = NodeCopies(memory, is_writer=local_rank == 0)
        own = memory[COPIES] if len(memory) > COPIES else memory_file("elasticjob-rank")
        self._random = RankRandomStates(RankMemory(own, local_rank)) if random_states else None
        self._objects, values = split_parts(parts, dir(self))
        self._values = tuple(values)
        self._frozen = FrozenParameters(self._objects, save_frozen=frozen_parameters)
        self.__dict__.update(values)
        self._packed()
        self._live = LiveState(self._objects, save_random_states=random_states)
        self._background = BackgroundCopy()
        self._live.before_change = self._background.wait
        self._writer = CopyWriter(self._copies, self._background)
        self._created_in_round = os.environ.get(Env.ROUND)
        self._created_in_spare = progress_channel.is_prestarted() and self._created_in_round != str(PRESTART_ROUND)
        """These objects were created in a spare process and may be stale."""
        self._survives_rounds = not progress_channel.process_survives_round()
        """Whether these objects outlive a round, so that a planned end need not copy them: they were created before the
        restartable function was called, or `sync` has seen them in a second round."""
        current.replace(self)

    if TYPE_CHECKING:  # plain values are attributes

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: Any) -> None: ...

    @property
    def step(self) -> int:
        """Number of steps done. An assignment, also of the same number, completes a step."""
        return self._step

    @step.setter
    def step(self, value: int) -> None:
        value = checked_step(value)
        guard.begin()  # also if a GradScaler has skipped the optimizer's step: the count goes on
        self._step = value
        self._sequence.advance()
        self._frozen.drop_trainable()
        self._live.has_progress = True
        if self._live.captured or self._live.changing:
            self._live.capture(self._plain_values())
        else:
            guard.complete()
        progress_channel.heartbeat()

    @contextmanager
    def update(
        self, *, total: SupportsIndex | None = None, metrics: Mapping[str, SupportsFloat] | None = None
    ) -> Iterator[None]:
        """A context for everything that changes the objects in one step; it counts the step and reports the progress.

            loss.backward()
            with state.update(metrics={"loss": loss}):
                optimizer.step()
                scheduler.step()

        The same as `state.step += 1` and `elasticjob.progress(state.step, total, metrics)` behind the optimizer's step,
        which is enough for optimizers of torch. Use it if State cannot notice the step: one in a CUDA graph that was
        captured before the State was created, or code that changes parameters by `.data`. An exception in the context
        leaves the step uncounted.
        """
        self._live.begin_change()
        yield
        self.step += 1
        progress_channel.progress(self._step, total, metrics)

    @property
    def changing(self) -> bool:
        """Whether an optimizer has begun a step that `step` does not count yet: the live state is not complete."""
        return self._live.changing

    def commit(self, *, non_blocking: bool = False) -> None:
        """Copy the state as it is now: a later crash loses only the steps after this call.

        Call it on all ranks. TypeError: a plain value cannot be kept. Before the function in a process that was started
        ahead of its round it does nothing: the pod has newer states.

        `non_blocking`: what the optimizers of the State change is copied while the caller goes on, and their next step
        waits until it is; a crash before then goes back to the commit before. Let nothing else change it until then:
        that step, or the next commit, raises RuntimeError if something has, and the commit before is kept.
        """
        if progress_channel.is_prestarted():
            return
        synchronize_device()
        guard.check()  # not even an error must come from what a broken collective has left
        packed = self._packed()  # an error leaves everything as it was, and comes on all ranks alike
        self._complete()  # also if a commit before has failed: it counts on the other ranks
        self._background.wait()
        other = current.get()
        if other is not None and other is not self:
            other._background.wait_ignoring_errors()  # it has the same memory
        if not self._copies.is_writer:
            return
        if non_blocking and other is self:  # no other State knows when its optimizers begin a step
            self._writer.write_late(self._packed_state(packed), self._objects)
        else:
            self._writer.write(self._packed_state(packed))

    def sync(self) -> None:
        """Bring every rank to the newest state: of any process that survived, any pod's memory, or the file.

        Call it once the process group exists, before the first step. If there is no state, nothing changes.
        RuntimeError on all ranks: there is no complete state, and an interruption has left a model half changed.
        Without a state, spare processes end, and new ones begin with the script: what they have read may be outdated.
        """
        self._background.wait_ignoring_errors()
        current.replace(self)
        self._survives_rounds = self._survives_rounds or os.environ.get(Env.ROUND) != self._created_in_round
        exchange = Exchange(self._part_devices())
        own = self._available_states()
        available = [AvailableStates.parse(numbers) for numbers in exchange.gather(own.numbers())]
        transfer = choose_transfer(available)
        if transfer is not None:
            report_lost_steps(available, transfer, own, self._live)
        same = equal_generators(available, transfer.version if transfer is not None else NO_VERSION)
        if transfer is not None:
            self._restore(exchange, transfer, own, same)
            self._created_in_spare = False
        elif self._created_in_spare:
            end_outdated_process()  # a process with the state has ended after its agent had reported that it stays
        elif any(other.half_changed for other in available):
            if own.half_changed:
                report_change(self._live)
            raise RuntimeError("every rank was interrupted inside a step, and there is no copy: restart the training")
        if self._random is not None:
            self._random.record_equal_generators(same)
        guard.begin()
        self._sequence.adopt(transfer.version[0] if transfer is not None else 0)
        self._live.capture(self._plain_values(), structure=True)
        self._live.note_sync()
        progress_channel.report_begin(self.step)

    def save(self) -> None:
        """Commit, and write `path` now (rank 0). ValueError if the State has no path."""
        if self.path is None:
            raise ValueError("this State has no path to save to: create it with State(path=...)")
        self.commit()
        if state_exchange.rank() == 0:
            state_file.save_block(self._copies.newest()[0], self.path)

    def _complete(self) -> None:
        """Let the objects as they are now be the newest state. Call it on all ranks, after a wait for the device."""
        with guard.section():
            guard.check()
            self._sequence.advance()
            self._live.has_progress = True
            self._live.capture(self._plain_values(), structure=True)
        if self._random is not None:
            self._random.store(self._version, self._live.random_states, self._copies.newest()[1].version)

    def _end_round(self) -> None:
        """At the last step of a planned end: keep the state for the next round, in the objects if they stay."""
        if progress_channel.process_survives_round() and self._survives_rounds:
            self._complete()
        else:
            self._background.wait_ignoring_errors()  # this commit replaces one that has failed
            self.commit()

    def _copy_live(self) -> None:
        """Copy the live objects to the pod's memory, if they are complete and newer than what is there.

        The process ends, and a step may have been interrupted in it: what that step has changed is undone first.
        """
        self._background.wait_ignoring_errors()
        if not self._live.complete or self._version <= self._copies.newest()[1].version:
            return
        synchronize_device()
        present = random_states.capture()  # the main thread may go on, with the numbers after its interruption
        self._set_values(self._live.restore())
        random_states.restore(present)
        if self._copies.is_writer:
            self._writer.write(self._packed_state(self._packed()))
        if self._random is not None:
            self._random.store(self._version, self._live.random_states, self._copies.newest()[1].version)

    # ---- what this rank has --------------------------------------------------------------------------------------

    @property
    def _version(self) -> Version:
        return self._sequence.number, self._step

    def _available_states(self) -> AvailableStates:
        live = self._live
        random, digests = NO_VERSION, (0,) * len(GENERATORS)
        if self._random is not None:
            random, digests = self._random.find(self._version, live.random_states if live.captured else {})
        file = state_file.read_file_header(self.path) if self.path and self._copies.is_writer else ABSENT
        return AvailableStates(
            live=self._version if live.complete else NO_VERSION,
            memory=self._copies.newest()[1],
            file=file,
            half_changed=live.half_changed,
            reached=self._step if live.half_changed else NO_STEP,
            random=random,
            digests=digests,
        )

    def _plain_values(self) -> dict[str, Any]:
        return {"step": self._step, **{name: getattr(self, name) for name in self._values}}

    def _packed(self) -> PackedTree:
        values = self._plain_values()
        check_values(values)
        return PackedTree({n: self._frozen.state_of(n, part) for n, part in self._objects.items()}, values)

    def _part_devices(self) -> list[Any]:
        tensors = (next(part.parameters(), None) for part in self._objects.values() if hasattr(part, "parameters"))
        return [tensor.device for tensor in tensors if tensor is not None]

    # ---- restore a state -----------------------------------------------------------------------------------------

    def _restore(self, exchange: Exchange, transfer: Transfer, own: AvailableStates, same: list[bool | None]) -> None:
        """Bring this rank to the chosen state, and send it if this rank is the sender."""
        is_live = own.live == transfer.version
        if is_live:
            self._set_values(self._live.restore())

        def live_block() -> LiveBlock:
            synchronize_device()
            state = self._packed_state(self._packed())
            return LiveBlock(state.version, state.content, state.packed)

        # A process that stays needs no copy in its pod's memory, and one without a state yet has none to lose.
        in_place = progress_channel.process_survives_round() and self._survives_rounds and not self._live.captured

        def receive_live(header: BlockHeader, receive: Receive) -> Loaded:
            return receive_into(self._objects, header, receive, self._live.invalidate)

        def copy_live() -> int:
            synchronize_device()
            return self._writer.write(self._packed_state(self._packed()))

        loaded = transfer_state(
            transfer,
            exchange,
            self._copies,
            is_live=is_live,
            live_block=live_block,
            copy_live=copy_live,
            receive_live=receive_live if in_place else None,
            path=self.path,
        )
        if loaded is not None:
            self._load(loaded, transfer.version, own, same)
        self._copies.release()

    def _load(self, loaded: Loaded, version: Version, own: AvailableStates, same: list[bool | None]) -> None:
        """Load a block into the objects and values, and set the random states."""
        content, tree = loaded
        survived = self._live.captured
        finishes_step = survived and self._step + 1 == version[1]
        self._live.invalidate()
        self._live.has_progress = True
        for name, part in self._objects.items():
            self._frozen.restore(name, part, tree["objects"][name], content.get("frozen", {}))
        self._set_values(tree["values"])
        if survived:
            self._live.drop_gradients()
        if self._random is not None:
            self._random.set_for(version, own.random, content.get("random"), same, finishes_step=finishes_step)

    def _set_values(self, values: dict[str, Any]) -> None:
        self._step = values["step"]
        own = {name: values[name] for name in self._values if name in values}
        self.__dict__.update(on_device_of(own, self.__dict__))

    def _packed_state(self, packed: PackedTree) -> PackedState:
        """Return what a block of the state has to contain."""
        record = self._random.shared(self._live.random_states) if self._random is not None else None
        settings = {"path": self.path, "save_minutes": self._save_minutes, "random": record}
        content = json.dumps({**settings, "frozen": self._frozen.digests(), "tree": packed.json}).encode()
        return PackedState(self._version, content, packed)


def internals(state: State) -> StateInternals:
    """Return what a State consists of, to watch it or to put another step in its place."""
    return StateInternals(
        live=state._live,
        copies=state._copies,
        writer=state._writer,
        background=state._background,
        sequence=state._sequence,
        copy_live=state._copy_live,
        end_round=state._end_round,
    )


current = CurrentState(internals)
