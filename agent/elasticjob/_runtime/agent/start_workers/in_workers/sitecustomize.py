"""Patch torch in each Python below a worker, when torch is imported; without torch nothing is done.

Python imports a module named sitecustomize at its start. This one also imports the sitecustomize that it hides. It
imports nothing else until torch is imported: each Python that a worker starts pays for it. Only the worker itself also
records the exception that ends it.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from types import CodeType, ModuleType
    from typing import Any

# Of a module outside of torch, `python -m` runs `main` and nothing else (`_Loader.get_code`).
PATCHES = {
    "torch.distributed.rendezvous": ("without_libuv.create_without_libuv", "group_prefixes.prefix_groups"),
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend": ("without_libuv.create_without_libuv",),
    "torch.distributed.distributed_c10d": ("one_world.check_groups", "group_prefixes.count_groups"),
    "torch.distributed.launcher.api": ("launchers.replace_agent",),
    "deepspeed.launcher.runner": ("other_launchers.replace_deepspeed",),
    "deepspeed.launcher.launch": ("other_launchers.replace_deepspeed_node",),
    "composer.cli.launcher": ("other_launchers.replace_composer",),
    "nvidia_resiliency_ext.fault_tolerance.launcher": ("other_launchers.refuse_ft_launcher",),
    "hyperpod_elastic_agent.run": ("other_launchers.refuse_hyperpodrun",),
    "transformers.trainer": ("trainers.extend_trainer",),
    "lightning.pytorch.trainer.trainer": ("lightning_status.show_progress", "lightning_stop.go_on"),
    "pytorch_lightning.trainer.trainer": ("lightning_status.show_progress", "lightning_stop.go_on"),
    "accelerate.accelerator": ("loop_status.note_accelerate",),
    "accelerate.optimizer": ("loop_status.count_accelerate",),
    "accelerate.utils.deepspeed": ("loop_status.count_accelerate",),
    "lightning.fabric.fabric": ("loop_status.note_fabric",),
    "lightning.fabric.wrappers": ("loop_status.count_fabric",),
    "lightning_fabric.fabric": ("loop_status.note_fabric",),
    "lightning_fabric.wrappers": ("loop_status.count_fabric",),
    "lightning.pytorch.trainer.connectors.accelerator_connector": ("lightning_world.follow_round",),
    "pytorch_lightning.trainer.connectors.accelerator_connector": ("lightning_world.follow_round",),
    "lightning.fabric.connector": ("lightning_world.follow_round",),
    "lightning_fabric.connector": ("lightning_world.follow_round",),
    "lightning.fabric.plugins.environments.torchelastic": ("lightning_world.fail_at_once",),
    "lightning_fabric.plugins.environments.torchelastic": ("lightning_world.fail_at_once",),
}
"""The functions of this folder\'s modules that patch a module of torch, of a launcher or of a framework."""
PACKAGE = "_elasticjob_in_workers"
"""The name of this folder as a package, which no program has."""
_PATCHED = "_elasticjob_patched"


def install() -> None:
    """Patch torch's modules that are imported already, and the others when they are imported."""
    restore_store()
    sys.meta_path.insert(0, _Finder())
    for name in PATCHES:
        if (module := sys.modules.get(name)) is not None:
            apply_patches(name, module)


def restore_store() -> None:
    """Set the address of the round's store again if a launcher changed it for one process with the worker's rank.

    accelerate does that for a job of several processes on CPUs: it starts one, and expects the others from mpirun.
    """
    environ = os.environ
    given = dict(word.split("=", 1) for word in environ.get("ELASTICJOB_WORLD", "").split() if "=" in word)
    same = all(environ.get(name) == given.get(name) for name in ("RANK", "WORLD_SIZE"))
    if same and "ELASTICJOB_TRAINS" not in environ and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        environ.update({name: given[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in given})


def record_own_end() -> None:
    """Let a worker that the agent has started by exec record the exception that ends it, as a fork does.

    Not the processes that it starts: one of them may fail without any harm to the worker.
    """
    if os.environ["ELASTICJOB_AGENT_PID"] == str(os.getppid()):
        _function("error_file.record_at_end")(os.environ["TORCHELASTIC_ERROR_FILE"])


def load() -> None:
    """Import all modules of this folder, ahead of need."""
    for patches in PATCHES.values():
        for patch in patches:
            _function(patch)


def apply_patches(name: str, module: ModuleType) -> None:
    if not hasattr(module, _PATCHED):
        setattr(module, _PATCHED, True)
        for patch in PATCHES[name]:
            try:
                _function(patch)(module)
            except Exception as error:  # another version of the package: the program must start nevertheless
                print(f"[elasticjob] {name} is not patched by {patch}: {error!r}", file=sys.stderr)


def _function(patch: str) -> Callable[..., None]:
    """Return a function of a module of this folder, which is on no path."""
    import importlib
    import importlib.util

    if PACKAGE not in sys.modules:
        here = os.path.dirname(__file__)  # noqa: PTH120
        package = os.path.join(here, "__init__.py")  # noqa: PTH118
        spec = importlib.util.spec_from_file_location(PACKAGE, package, submodule_search_locations=[here])
        assert spec is not None  # noqa: S101
        sys.modules[PACKAGE] = importlib.util.module_from_spec(spec)
    module, _, name = patch.partition(".")
    found: Callable[..., None] = getattr(importlib.import_module(f"{PACKAGE}.{module}"), name)
    return found


class _Finder:
    """Finds the modules by the other finders, and wraps their loaders."""

    def __init__(self) -> None:
        self._finding: set[tuple[str, int]] = set()
        """Names, and the threads that search them."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in PATCHES:
            return None
        import importlib.util
        import threading

        own = (name, threading.get_ident())
        if own in self._finding:
            return None
        self._finding.add(own)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._finding.discard(own)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)  # type: ignore[assignment]
        return spec


class _Loader:
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._inner.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        apply_patches(module.__name__, module)

    def get_code(self, name: str) -> CodeType | None:
        """Return the code that `python -m NAME` runs: that of a launcher calls the launcher's patched function."""
        if name.startswith("torch."):
            code: CodeType | None = self._inner.get_code(name)
            return code
        return compile(f"import sys\nfrom {name} import main\nsys.exit(main())\n", f"<{name}>", "exec")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)  # such as get_source, for tracebacks


def _import_hidden() -> None:
    import importlib

    here = os.path.dirname(__file__)  # noqa: PTH120
    sys.path[:] = [entry for entry in sys.path if entry != here]
    this_module = sys.modules.pop(__name__)
    try:
        importlib.import_module(__name__)
    except ImportError:
        sys.modules[__name__] = this_module


if __name__ == "sitecustomize":
    if "ELASTICJOB_WORLD" in os.environ or os.environ.get("USE_LIBUV") == "0":  # else there is nothing to patch
        install()
    if "ELASTICJOB_AGENT_PID" in os.environ:
        record_own_end()
    _import_hidden()
