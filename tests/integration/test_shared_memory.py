"""What a killed worker left in shared memory is gone before its successor starts."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from support.agent.slow_tracker import CODE
from support.agent.worker_scripts import script
from support.local.run import LocalRun, manifest

FAILS_ONCE = f"""
{CODE}
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    create(sys.argv[1])
    os.kill(os.getpid(), signal.SIGKILL)
print("successor", flush=True)
"""


def test_a_restart_waits_for_the_tracker_of_the_workers_before_it(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with ExitStack() as stack:
        run = stack.enter_context(LocalRun(manifest([*script(tmp_path, FAILS_ONCE), str(gate)]), tmp_path))
        # The agent has then reaped the worker, and stops what is left of it. What the worker wrote may come later.
        lines = [run.wait_for(r"tracker (\d+) memory (\S+)|\[agent\].* died: SIGKILL") for _ in range(2)]
        (found,) = (line for line in lines if line[1])
        tracker, memory = Path("/proc") / found[1], Path("/dev/shm") / found[2]
        stack.callback(memory.unlink, missing_ok=True)
        assert memory.exists()
        assert tracker.exists()
        gate.touch()
        run.wait_for("successor")
        assert not memory.exists()
        assert run.exit_code() == 0
