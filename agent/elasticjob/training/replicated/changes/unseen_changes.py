"""Changes of parameters that no optimizer has announced, such as those of a step without torch's optimizers.

torch counts the changes of each tensor. It counts neither those of fused optimizers and CUDA graphs, which the hook of
an optimizer and `watched_torch` see, nor those through `.data`, for which there is `State.update`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class UnseenChanges:
    """The versions of all parameters of some modules, as they were at the last `capture`."""

    def __init__(self, modules: Iterable[Any]) -> None:
        self._modules = tuple(modules)
        self._parameters: list[Any] = []
        self._versions: list[int] = []

    def refresh(self) -> None:
        """Find the parameters again, and note their versions."""
        found = {
            id(parameter): parameter
            for module in self._modules
            for child in module.modules()
            if getattr(child, "max_norm", None) is None  # an Embedding that changes its weight in each forward pass
            for parameter in child.parameters(recurse=False)
        }
        self._parameters = [parameter for parameter in found.values() if not parameter.is_inference()]  # has no version
        self.capture()

    def capture(self) -> None:
        """Note the versions of what `refresh` found."""
        self._versions = [parameter._version for parameter in self._parameters]

    def changed_parameter(self) -> str:
        """Return the name of a parameter that has changed since then; empty if none has."""
        for parameter, version in zip(self._parameters, self._versions, strict=True):
            if parameter._version != version:
                return self._name_of(parameter)
        return ""

    def _name_of(self, parameter: Any) -> str:
        for module in self._modules:
            for name, found in module.named_parameters():
                if found is parameter:
                    return str(name)
        return "a parameter"
