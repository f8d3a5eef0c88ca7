"""How a function of a file is called in a pod: by the name of its module. Nothing is pickled."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticjob.cli.shipping.errors import SubmitError

_CALL = "import json, sys; from {module} import {name}; {name}(**json.loads(sys.argv[1]))"


@dataclass(frozen=True)
class FunctionCall:
    """A function that a job shall call."""

    root: Path
    """The folder from which its module is imported."""
    command: tuple[str, ...]
    name: str


def function_call(function: Callable[..., Any], arguments: Mapping[str, Any]) -> FunctionCall:
    """Return how a pod calls the function. SubmitError: it has no file or no name there, or an argument is no JSON."""
    name = str(getattr(function, "__qualname__", "") or type(function).__name__)
    if not name.isidentifier():
        raise SubmitError(
            f"{name}: only a function at the top of a file can be submitted, and no lambda, method or inner function"
        )
    module, file = _module_of(function, name)
    try:
        text = json.dumps(dict(arguments))
    except (TypeError, ValueError) as error:
        raise SubmitError(f"the arguments of {name} must be JSON values: {error}") from None
    parts = module.split(".")
    root = file.parents[len(parts) - (0 if file.name == "__init__.py" else 1)]
    return FunctionCall(root, ("python3", "-c", _CALL.format(module=module, name=name), text), name)


def _module_of(function: Callable[..., Any], name: str) -> tuple[str, Path]:
    """Return the module from which a pod imports the function, and its file."""
    module = str(getattr(function, "__module__", ""))
    file = getattr(sys.modules.get(module), "__file__", None)
    # IPython sets __file__ of __main__ while it runs a notebook from a script; the function is not in there.
    code_file = getattr(getattr(function, "__code__", None), "co_filename", file)
    if not file or not Path(file).is_file() or (module == "__main__" and code_file != file):
        raise SubmitError(
            f"{name} has no file: it was defined in a notebook or at a prompt, and only files are shipped. Write it to"
            f" a file (in a notebook: %%writefile train.py), then `from train import {name}` and submit that"
        )
    path = Path(file).resolve()
    if module != "__main__":
        return module, path
    # The pod imports the file by its name, as one imports a script whose main part is behind `if __name__ == ...`.
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return (spec.name if spec is not None else path.stem), path
