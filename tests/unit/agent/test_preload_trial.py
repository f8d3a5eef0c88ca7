"""Which imports a candidate of preload learning accepts; each case runs in its own process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from elasticjob._runtime.system.code_root import CODE_ROOT

IMPORT_REPORTED = """
import json, os, pathlib, sys
sys.path[:0] = [sys.argv[1]]
from elasticjob._runtime.agent.start_workers.fork_server import preload_learning
from elasticjob._runtime.agent.start_workers.fork_server import preload_trial
from elasticjob._runtime.agent.start_workers.fork_server import self_test
preload_trial.MIN_CPU_SECONDS, preload_trial.DEADLINE = float(sys.argv[2]), int(sys.argv[4])
self_test.SELF_TEST_TIMEOUT = 0.5
self_test.PROCESS = pathlib.Path(os.environ["PROCESS"])
baseline = preload_learning.Baseline(frozenset(sys.modules), dict(os.environ))
result = preload_trial.import_reported(preload_learning.ImportReport(*json.loads(sys.argv[3])), baseline, set())
print(json.dumps([result, sorted(name for name in sys.modules if name not in baseline.modules)]))
"""


@dataclass(frozen=True)
class Case:
    reason: str
    """Part of the reason for rejection; empty if the imports are accepted."""
    libraries: dict[str, str]
    """Source by module name."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables whose values differ in the worker."""
    set_by_program: tuple[str, ...] = ()
    devices: bool = False
    """Whether the open files of the process are symbolic links in a folder, to which imports may add."""


def opens(*devices: str) -> str:
    """Return a module that has these devices open, as the case's `/proc/self` says."""
    links = "".join(f"os.symlink({path!r}, f'{{fd}}/{7 + number}')\n" for number, path in enumerate(devices))
    return f"import os\nfd = os.environ['PROCESS'] + '/fd'\n{links}"


CASES = {
    "plain": Case("", {"one": "import two", "two": "", "pkg.inner": ""}),
    "a thread": Case(
        "started 1 thread: writer",
        {
            "one": "import threading\n"
            "threading.Thread(target=threading.Event().wait, name='writer', daemon=True).start()"
        },
    ),
    "a process": Case("started a process", {"one": "import subprocess; p = subprocess.Popen(['cat'], stdin=-1)"}),
    "an open file": Case("left files open", {"one": "f = open('/dev/null')"}),
    "NVML": Case("", {"one": opens("/dev/nvidiactl")}, devices=True),
    "a GPU": Case("the imports opened /dev/nvidia0", {"one": opens("/dev/nvidiactl", "/dev/nvidia0")}, devices=True),
    "the GPUs' memory": Case("the imports opened /dev/nvidia-uvm", {"one": opens("/dev/nvidia-uvm")}, devices=True),
    "an exception": Case("importing two raised RuntimeError: no", {"one": "", "two": "raise RuntimeError('no')"}),
    "an end": Case("importing one raised SystemExit: 3", {"one": "raise SystemExit(3)"}),
    "a fork that hangs": Case(
        "hung in its first parallel operation",
        {"one": "import os, threading; os.register_at_fork(after_in_child=threading.Event().wait)"},
    ),
    "a fork that dies": Case("died", {"one": "import os; os.register_at_fork(after_in_child=lambda: os._exit(3))"}),
    "a module of the user": Case("a library imports local, which is not of a library", {"one": "import local"}),
    "a rank": Case(
        "the imports read RANK, whose values differ in workers",
        {"one": "import os; os.environ.get('RANK', 0)"},
        {"RANK": "1"},
    ),
    "another rank": Case("", {"one": "import os; os.environ.get('HOME', 0)"}, {"RANK": "1"}),
    "a variable of the script": Case(
        "the imports read HF_HOME", {"one": "import os; 'HF_HOME' in os.environ"}, {"HF_HOME": "/x"}, ("HF_HOME",)
    ),
    "a variable that libraries set": Case(
        "", {"one": "import os; os.environ.setdefault('KMP_INIT', '1')"}, {"KMP_INIT": "1"}, ("KMP_INIT",)
    ),
    "a variable for native code": Case(
        "the script sets OMP_NUM_THREADS", {"one": ""}, {"OMP_NUM_THREADS": "3"}, ("OMP_NUM_THREADS",)
    ),
    "a variable for a library's native code": Case(
        "the script sets TF_LOG", {"tensorflow": ""}, {"TF_LOG": "3"}, ("TF_LOG",)
    ),
    "a variable for a library that is not imported": Case("", {"one": ""}, {"TF_LOG": "3"}, ("TF_LOG",)),
}


def import_reported(
    folder: Path, case: Case, min_cpu_seconds: float = 0.0, deadline: int = 60, **reported: object
) -> tuple[dict[str, object], list[str]]:
    """Return the candidate's result, and the modules that it imported."""
    site = folder / "site-packages"
    files = []
    for name, text in case.libraries.items():
        path = site.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        files.append((name, str(path)))
    (folder / "local.py").write_text("")
    report: dict[str, object] = {"modules": files, "package": "", "directory": "/app"} | reported
    encoded = json.dumps([*report.values(), case.environment, case.set_by_program])
    process = Path("/proc/self")
    if case.devices:
        process = folder / "process"
        (process / "fd").mkdir(parents=True)
        (process / "fd" / "0").symlink_to("/dev/null")
    env = {"PYTHONPATH": f"{site}{os.pathsep}{folder}", "HOME": "/", "PROCESS": str(process)}
    argv = [sys.executable, "-c", IMPORT_REPORTED, CODE_ROOT, str(min_cpu_seconds), encoded, str(deadline)]
    done = subprocess.run(argv, env=env, stdout=subprocess.PIPE, check=True, timeout=60)
    result, imported = json.loads(done.stdout)
    return result, [name for name in imported if name in [*case.libraries, "local"]]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_imports(case: Case, tmp_path: Path) -> None:
    result, imported = import_reported(tmp_path, case)
    if case.reason:
        assert result["ready"] is False
        assert case.reason in str(result["reason"])
    else:
        assert (result["ready"], imported) == (True, sorted(case.libraries)), result


@pytest.mark.slow
def test_imports_that_take_little_time_are_rejected(tmp_path: Path) -> None:
    busy = "import time\nwhile time.process_time() < {}: pass"
    assert import_reported(tmp_path, Case("", {"one": ""}), 0.3)[0] == {"ready": False, "reason": ""}
    assert import_reported(tmp_path, Case("", {"one": busy.format(0.5)}), 0.3)[0]["ready"] is True


def test_an_installed_program_is_not_imported(tmp_path: Path) -> None:
    case = Case("", {"one": "", "mine.train": "", "mine.model": ""})
    assert import_reported(tmp_path, case, package="mine")[1] == ["one"]
    (tmp_path / "site-packages" / "mine" / "__init__.py").write_text("")
    assert import_reported(tmp_path, case, directory=str(tmp_path / "site-packages" / "mine"))[1] == ["one"]


def test_a_module_must_come_from_the_same_file(tmp_path: Path) -> None:
    elsewhere = "/usr/lib/python3/dist-packages/one.py"
    result, _ = import_reported(tmp_path, Case("", {"one": ""}), modules=[("one", elsewhere)])
    assert result["reason"] == f"importing one did not load {elsewhere}"


def test_the_deadline_ends_an_import_that_hangs(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError, match="SIGALRM"):
        import_reported(tmp_path, Case("", {"one": "import threading; threading.Event().wait()"}), deadline=1)
