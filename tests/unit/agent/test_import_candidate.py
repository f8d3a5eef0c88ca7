"""What a student of the warm process may learn, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from elasticjob.code_root import CODE_ROOT

STUDY = """
import json, os, sys
sys.path[:0] = [sys.argv[1]]
from elasticjob.agent.start_workers.fork_server import preload_learning
from elasticjob.agent.start_workers.fork_server import candidate
from elasticjob.agent.start_workers.fork_server import self_test
candidate.MIN_CPU_SECONDS, candidate.DEADLINE, self_test.SELF_TEST_TIMEOUT = float(sys.argv[2]), int(sys.argv[4]), 0.5
baseline = preload_learning.Baseline(frozenset(sys.modules), dict(os.environ))
verdict = candidate.import_reported(preload_learning.ImportReport(*json.loads(sys.argv[3])), baseline)
print(json.dumps([verdict, sorted(name for name in sys.modules if name not in baseline.modules)]))
"""


@dataclass(frozen=True)
class Lesson:
    """Libraries by their source, what differs in the worker, and why they are not learned."""

    why: str
    libraries: dict[str, str]
    environment: dict[str, str] = field(default_factory=dict)
    own: tuple[str, ...] = ()


LESSONS = {
    "plain": Lesson("", {"one": "import two", "two": "", "pkg.inner": ""}),
    "a thread": Lesson(
        "started 1 thread(s): writer",
        {
            "one": "import threading\n"
            "threading.Thread(target=threading.Event().wait, name='writer', daemon=True).start()"
        },
    ),
    "a process": Lesson("started a process", {"one": "import subprocess; p = subprocess.Popen(['cat'], stdin=-1)"}),
    "an open file": Lesson("left files open", {"one": "f = open('/dev/null')"}),
    "an exception": Lesson("importing two raised RuntimeError: no", {"one": "", "two": "raise RuntimeError('no')"}),
    "an end": Lesson("importing one raised SystemExit: 3", {"one": "raise SystemExit(3)"}),
    "a fork that hangs": Lesson(
        "hung in its first parallel operation",
        {"one": "import os, threading; os.register_at_fork(after_in_child=threading.Event().wait)"},
    ),
    "a fork that dies": Lesson("died", {"one": "import os; os.register_at_fork(after_in_child=lambda: os._exit(3))"}),
    "a module of the user's": Lesson("a library imports local of", {"one": "import local"}),
    "a rank": Lesson(
        "they read RANK, which workers set", {"one": "import os; os.environ.get('RANK', 0)"}, {"RANK": "1"}
    ),
    "another rank": Lesson("", {"one": "import os; os.environ.get('HOME', 0)"}, {"RANK": "1"}),
    "a variable of the script's": Lesson(
        "they read HF_HOME", {"one": "import os; 'HF_HOME' in os.environ"}, {"HF_HOME": "/x"}, ("HF_HOME",)
    ),
    "a variable that libraries set": Lesson(
        "", {"one": "import os; os.environ.setdefault('KMP_INIT', '1')"}, {"KMP_INIT": "1"}, ("KMP_INIT",)
    ),
    "a variable for native code": Lesson(
        "the script sets OMP_NUM_THREADS", {"one": ""}, {"OMP_NUM_THREADS": "3"}, ("OMP_NUM_THREADS",)
    ),
}


def study(
    folder: Path, lesson: Lesson, worth: float = 0.0, deadline: int = 60, **reported: object
) -> tuple[dict[str, object], list[str]]:
    """The verdict, and what was imported."""
    site = folder / "site-packages"
    files = []
    for name, text in lesson.libraries.items():
        path = site.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        files.append((name, str(path)))
    (folder / "local.py").write_text("")
    report: dict[str, object] = {"modules": files, "package": "", "directory": "/app"} | reported
    words = json.dumps([*report.values(), lesson.environment, lesson.own])
    env = {"PYTHONPATH": f"{site}{os.pathsep}{folder}", "HOME": "/"}
    argv = [sys.executable, "-c", STUDY, CODE_ROOT, str(worth), words, str(deadline)]
    done = subprocess.run(argv, env=env, stdout=subprocess.PIPE, check=True, timeout=60)
    verdict, imported = json.loads(done.stdout)
    return verdict, [name for name in imported if name in [*lesson.libraries, "local"]]


@pytest.mark.parametrize("lesson", LESSONS.values(), ids=LESSONS.keys())
def test_a_lesson(lesson: Lesson, tmp_path: Path) -> None:
    verdict, imported = study(tmp_path, lesson)
    if lesson.why:
        assert verdict["ready"] is False
        assert lesson.why in str(verdict["why"])
    else:
        assert (verdict["ready"], imported) == (True, sorted(lesson.libraries)), verdict


def test_what_saves_little_is_not_worth_a_process(tmp_path: Path) -> None:
    busy = "import time\nwhile time.process_time() < {}: pass"
    assert study(tmp_path, Lesson("", {"one": ""}), 0.3)[0] == {"ready": False, "why": ""}
    assert study(tmp_path, Lesson("", {"one": busy.format(0.5)}), 0.3)[0]["ready"] is True


def test_what_is_installed_of_the_program_is_read_afresh(tmp_path: Path) -> None:
    lesson = Lesson("", {"one": "", "mine.train": "", "mine.model": ""})
    assert study(tmp_path, lesson, package="mine")[1] == ["one"]
    (tmp_path / "site-packages" / "mine" / "__init__.py").write_text("")
    assert study(tmp_path, lesson, directory=str(tmp_path / "site-packages" / "mine"))[1] == ["one"]


def test_a_module_found_elsewhere_is_not_the_same(tmp_path: Path) -> None:
    elsewhere = "/usr/lib/python3/dist-packages/one.py"
    verdict, _ = study(tmp_path, Lesson("", {"one": ""}), modules=[("one", elsewhere)])
    assert verdict["why"] == f"one is not {elsewhere}"


def test_an_import_that_never_ends_is_ended(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError, match="SIGALRM"):
        study(tmp_path, Lesson("", {"one": "import threading; threading.Event().wait()"}), deadline=1)
