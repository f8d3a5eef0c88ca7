"""The live objects of a State: model, optimizer and values as of the last completed step of this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from elasticjob.training import random_states
from elasticjob.training.replicated.changes import watched_torch
from elasticjob.training.replicated.changes.unseen_changes import UnseenChanges
from elasticjob.training.replicated.copies.scaler_copy import ScalerCopy, is_scaler
from elasticjob.training.replicated.copies.snapshots import BufferCopies, Snapshot
from elasticjob.training.state_parts import restore_part, state_of
from elasticjob.training.update_guard import guard


class LiveState:
    """Whether the objects are complete, and copies of what an interrupted step may have changed in them.

    A change of the model is under way from an optimizer's step until `capture`: meanwhile the objects are not complete.
    An interrupted step that has not come so far has changed no parameter, but perhaps buffers, plain values, the
    settings in the optimizers' parameter groups, the other objects and the random states: `restore` undoes
    these changes.
    """

    def __init__(self, objects: Mapping[str, Any], *, save_random_states: bool) -> None:
        kinds = _by_kind(objects.values())
        self._modules, self._optimizers, scalers, self._others = kinds
        self._scalers = [ScalerCopy(scaler) for scaler in scalers]
        self._buffers = BufferCopies(self._modules)
        self._save_random_states = save_random_states
        self.random_states: dict[str, Any] = {}
        """States of this process's generators at the last `capture`; empty if they are not kept."""
        self.changing = False
        """Whether an optimizer has begun a step that is not counted yet."""
        self._captured = False
        self._replaced = False
        self._values = self._groups = self._states = Snapshot(None)
        self._unseen = UnseenChanges(self._modules)
        self._synced_in = -1
        """`guard.rounds` at the last `note_sync`."""
        self.has_progress = False
        """Whether a step was counted, or a state was committed or loaded. Before that, a script sets its parameters."""
        self._hooks: list[Any] = []
        self.before_change: Callable[[], None] = lambda: None
        """Called before an optimizer changes the objects. What it raises comes from the optimizer's step."""

    @property
    def complete(self) -> bool:
        """Whether the objects, with the copies, hold the state as of the last `capture`."""
        copies = (self._values, self._groups, self._states)
        return self._captured and not self._between_states and all(snapshot.intact for snapshot in copies)

    @property
    def captured(self) -> bool:
        """Whether there has been a `capture`, and no `invalidate` since then."""
        return self._captured

    @property
    def half_changed(self) -> bool:
        """Whether an interruption has left the objects between two states."""
        return self._replaced or (self._captured and self._between_states)

    @property
    def _between_states(self) -> bool:
        unseen = self.has_progress and bool(self._unseen.changed_parameter())
        return self.changing or not guard.last_update_is_whole or unseen

    def describe_change(self) -> str:
        """Return what has changed since the last `capture`, if the objects are not complete because of that."""
        if not guard.last_update_is_whole:
            return "the device had not completed the last step"
        if not self.changing and (name := self._unseen.changed_parameter()):
            return f"{name} has changed since `step` was assigned, and not in an optimizer's step"
        return "it was interrupted between an optimizer's step and the assignment of `step`"

    def capture(self, values: Mapping[str, Any], *, structure: bool = False) -> None:
        """Copy what the next step may change early. The objects and `values` are complete now: this ends a change.

        `structure`: modules and their buffers may have changed too.
        """
        with guard.section():
            first, self._captured = not self._captured, False
            if structure or first:
                self._buffers.refresh()
                self._unseen.refresh()
            else:
                self._buffers.capture()
                self._unseen.capture()
            for scaler in self._scalers:
                scaler.capture()
            self._values = Snapshot(values)
            self._groups = Snapshot([_settings(optimizer) for optimizer in self._optimizers])
            self._states = Snapshot([state_of(part) for part in self._others])
            self.random_states = random_states.capture() if self._save_random_states else {}
            self._captured, self._replaced = True, False
            self.changing = False
            guard.complete()

    def restore(self) -> Any:
        """Undo what an interrupted step has changed, drop the gradients, and return the plain values."""
        self._buffers.restore()
        for scaler in self._scalers:
            scaler.restore()
        for optimizer, settings in zip(self._optimizers, self._groups.value(), strict=True):
            for group, kept in zip(optimizer.param_groups, settings, strict=True):
                group.update(kept)
        for part, state in zip(self._others, self._states.value(), strict=True):
            restore_part(part, state)
        random_states.restore(self.random_states)
        self.drop_gradients()
        return self._values.value()

    def invalidate(self) -> None:
        """Note that the objects are being replaced: they are complete again at the next `capture`."""
        self._captured, self._replaced = False, True

    def drop_gradients(self) -> None:
        """Free the gradients of an interrupted backward pass; where a graph may write to them, set them to 0."""
        for holder in (*self._optimizers, *self._modules):
            holder.zero_grad(set_to_none=not watched_torch.has_graphs())

    def watch(self) -> None:
        """Notice the steps of the optimizers from now on."""
        watched_torch.watch(self)
        if not self._hooks:
            self._hooks = [optimizer.register_step_pre_hook(self._before_step) for optimizer in self._optimizers]

    def stop_watching(self) -> None:
        """Let another State watch the optimizers. These objects are no longer known to be complete."""
        if self.changing:
            self.changing = False
            guard.abandon()
        self._captured = False
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def begin_change(self) -> None:
        """Note that the objects change from now on, until `capture`. RankShouldRestart: the round has ended."""
        if not self.changing:
            self.before_change()
            guard.begin()
            self.changing = True

    def note_sync(self) -> None:
        """All ranks have the same objects from now on."""
        self._synced_in = guard.rounds

    def note_broadcast(self) -> None:
        """DistributedDataParallel has written the parameters of rank 0 to all ranks.

        They have the same after the `sync` of this round. Before it, those of rank 0 may be others: that is a change.
        """
        if self._captured and not self.changing and self._synced_in == guard.rounds:
            guard.wait()  # a broadcast that was broken counts as a change
            self._unseen.capture()

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run before each step of an optimizer; return other arguments for it, or None."""
        if watched_torch.note_captured_step():
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self.begin_change()
            return None
        if not _calls_closure_first(optimizer):
            self.begin_change()

        def closure_and_wait(*args: Any, **kwargs: Any) -> Any:
            result = closure(*args, **kwargs)
            if self.changing:
                guard.wait()  # for the gradients of this call
            self.begin_change()
            return result

        if "closure" in kwargs:
            return args, {**kwargs, "closure": closure_and_wait}
        return (args[0], closure_and_wait, *args[2:]), kwargs

    # torch.compile must not trace the hook: what it does would take effect after the step.
    _before_step._torchdynamo_disable = True  # type: ignore[attr-defined]
    _before_step._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
        "elasticjob.State must see the optimizer's step: call optimizer.step() outside of what is compiled with "
        "fullgraph=True"
    )


def _by_kind(parts: Any) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
    """Return modules, optimizers, gradient scalers and other objects."""
    kinds: tuple[list[Any], list[Any], list[Any], list[Any]] = ([], [], [], [])
    for part in parts:
        is_kind = (isinstance(part, torch.nn.Module), isinstance(part, torch.optim.Optimizer), is_scaler(part), True)
        kinds[is_kind.index(True)].append(part)
    return kinds


def _calls_closure_first(optimizer: Any) -> bool:
    """Return whether an optimizer changes nothing before it has called the closure, as all of torch's own."""
    return type(optimizer).__module__.startswith("torch.optim.")


def _settings(optimizer: Any) -> list[dict[str, Any]]:
    """Return the parameter groups without their parameters."""
    return [{key: item for key, item in group.items() if key != "params"} for group in optimizer.param_groups]
