"""The parameters that a State leaves to the script, because training does not change them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from elasticjob.training.state_parts import restore_part, state_of


class FrozenParameters:
    """Packs and restores the parts of a State, without the parameters that have never needed a gradient."""

    def __init__(self, objects: Mapping[str, Any], *, keep: bool) -> None:
        """`objects`: the parts by name, as the script has made them. `keep`: leave nothing out."""
        modules = {n: part for n, part in objects.items() if not keep and isinstance(part, torch.nn.Module)}
        self._frozen = {name: _frozen(module) for name, module in modules.items()}

    def state_of(self, name: str, part: Any) -> Any:
        """Return the state of a part that has to be kept."""
        state = state_of(part)
        if name not in self._frozen:
            return state
        self._frozen[name] &= _frozen(part)  # one that has been trained is kept from then on
        return {key: value for key, value in state.items() if key not in self._frozen[name]}

    def restore(self, name: str, part: Any, state: Any) -> None:
        """Load what `state_of` returned, perhaps on another rank. RuntimeError: it lacks what is not frozen here."""
        if name not in self._frozen:
            restore_part(part, state)
            return
        self._frozen[name] -= state.keys()
        found = part.load_state_dict(state, strict=False)
        problems = [*sorted(set(found.missing_keys) - self._frozen[name]), *found.unexpected_keys]
        if problems:
            raise RuntimeError(
                f"State({name}=...): {problems[0]} is frozen on one rank and not on the other, or only one has it: "
                "freeze the same parameters in every process, before State(...)"
            )


def _frozen(module: Any) -> set[str]:
    parameters = module.named_parameters(remove_duplicate=False)
    return {name for name, parameter in parameters if not parameter.requires_grad}
