"""Workers (real processes) report their steps to the agent, and stop at the step that it sets."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from elasticjob._runtime.agent.monitoring.progress import worker_progress as worker_progress_module
from elasticjob._runtime.agent.monitoring.progress.worker_progress import WorkerProgress
from elasticjob._runtime.contract.messages import Metric, StateReceived, TrainingProgress
from elasticjob._runtime.contract.names import Env, RoundId
from elasticjob._runtime.system.code_root import CODE_ROOT

ROUND = RoundId(1, 0, 1)
COUNT = """
import sys
import time
import elasticjob
elasticjob.on_stop(lambda: print("saved", flush=True))
for step in range(int(sys.argv[1]), 1000, int(sys.argv[2])):
    elasticjob.progress(step)
    print("passed", step, flush=True)
    sys.stdin.readline()
"""


class Script:
    """A worker that continues by one step for each line of input."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def line(self) -> str:
        assert self._process.stdout is not None
        return (await asyncio.wait_for(self._process.stdout.readline(), 20)).decode().strip()

    def resume(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")

    async def end(self) -> int:
        assert self._process.stdin is not None
        self._process.stdin.close()
        return await asyncio.wait_for(self._process.wait(), 20)


async def script(text: str, *args: object, path: str = "", local_rank: int = 0, round_id: RoundId = ROUND) -> Script:
    env = {**os.environ, "PYTHONPATH": CODE_ROOT, "LOCAL_RANK": str(local_rank), Env.ROUND: str(round_id)}
    if path:
        env[Env.AGENT_SOCKET] = path
    return Script(
        await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            text,
            *map(str, args),
            env=env,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
    )


@pytest.fixture
async def progress(tmp_path: Path) -> AsyncIterator[WorkerProgress]:
    found = WorkerProgress(tmp_path)
    found.begin_round(ROUND)
    yield found
    found.close()


def steps(progress: WorkerProgress) -> dict[int, int]:
    return {report.local_rank: report.step for report in progress.reports()}


async def test_the_agent_sees_each_workers_latest_step_and_its_time(progress: WorkerProgress) -> None:
    before, connected = asyncio.get_running_loop().time(), list[None]()
    progress.on_worker_connected = lambda: connected.append(None)
    workers = [await script(COUNT, 5 + rank, 10, path=progress.path, local_rank=rank) for rank in range(2)]
    assert [await w.line() for w in workers] == ["passed 5", "passed 6"]
    assert steps(progress) == {0: 5, 1: 6}
    assert all(before < report.time < asyncio.get_running_loop().time() for report in progress.reports())
    workers[1].resume()
    assert await workers[1].line() == "passed 16"
    assert steps(progress) == {0: 5, 1: 16}
    assert len(connected) == 2
    for worker in workers:
        await worker.end()


DEADLINE = """
import sys
import elasticjob
for _ in sys.stdin:
    print(elasticjob.deadline(), flush=True)
"""


@pytest.mark.parametrize("round_id", [ROUND, RoundId(0, 0, 0), RoundId(0, 0, 1)], ids=["in it", "ahead", "spare"])
async def test_a_worker_reads_how_long_it_has(progress: WorkerProgress, round_id: RoundId) -> None:
    worker = await script(DEADLINE, path=progress.path, round_id=round_id)

    async def deadline() -> str:
        worker.resume()
        return await worker.line()

    assert await deadline() == "None"
    progress.set_deadline(time.monotonic() + 100)
    assert 80 < float(await deadline()) <= 100
    progress.set_deadline(time.monotonic() - 1)
    assert await deadline() == "0.0"
    for never in (float("inf"), 1e12):
        progress.set_deadline(never)
        assert await deadline() == "None"
    progress.set_deadline(time.monotonic() + 100)
    later = await script(DEADLINE, path=progress.path, local_rank=1)
    later.resume()
    assert 80 < float(await later.line()) <= 100, "known to a worker that asks for the first time"
    await later.end()
    await worker.end()


async def test_the_ranks_of_the_next_launcher_count_their_own_steps(progress: WorkerProgress) -> None:
    first = await script(COUNT, 50, 10, path=progress.path)
    assert await first.line() == "passed 50"
    await first.end()
    progress.end_stage()
    assert (steps(progress), await progress.hold(1), progress.has_steps) == ({}, None, True)
    second = await script(COUNT, 1, 1, path=progress.path)
    assert await second.line() == "passed 1"
    assert [report.step for report in progress.heartbeats()] == [1], "its script has not ended"
    await second.end()


async def test_steps_of_a_process_that_waits_for_a_round_are_not_those_of_its_rank(progress: WorkerProgress) -> None:
    worker = await script(COUNT, 5, 1, path=progress.path)
    assert await worker.line() == "passed 5"
    spare = await script(COUNT, 90, 1, path=progress.path, round_id=RoundId(0, 0, 1))
    assert await spare.line() == "passed 90"
    assert steps(progress) == {0: 5}
    await spare.end()
    await worker.end()


async def test_without_an_agent_there_is_no_deadline() -> None:
    worker = await script(DEADLINE)
    worker.resume()
    assert await worker.line() == "None"
    await worker.end()


async def test_workers_save_and_stop_at_the_first_report_of_the_last_step_or_a_later_one(
    progress: WorkerProgress,
) -> None:
    workers = [await script(COUNT, 0, stride, path=progress.path, local_rank=stride - 1) for stride in (1, 2)]
    assert [await w.line() for w in workers] == ["passed 0", "passed 0"]
    assert await progress.hold(2) == 1
    for worker in workers:
        worker.resume()
    assert progress.stop_at(2)
    assert await workers[0].line() == "passed 1"
    workers[0].resume()
    for worker in workers:
        assert await worker.line() == "saved"
        assert await worker.end() == 0
    assert steps(progress) == {0: 2, 1: 2}
    assert progress.stopped(0)
    assert progress.stopped(1)


CLEANS_UP = """
import atexit, sys
import elasticjob
class Part:
    def __del__(self):
        print("deleted")
part = Part()
atexit.register(print, "and exits")
elasticjob.progress(0)
print("waits", flush=True)
sys.stdin.readline()
try:
    elasticjob.progress(1)
finally:
    print("cleaned up", end=" ")
"""


async def test_a_worker_that_stops_ends_like_any_program(progress: WorkerProgress) -> None:
    worker = await script(CLEANS_UP, path=progress.path)
    assert await worker.line() == "waits"
    assert await progress.hold(1) == 1
    assert progress.stop_at(1)
    worker.resume()
    assert [await worker.line(), await worker.line()] == ["cleaned up and exits", "deleted"]
    assert await worker.end() == 0


async def test_a_held_worker_waits_until_the_last_step_is_known(progress: WorkerProgress) -> None:
    worker = await script(COUNT, 3, 1, path=progress.path)
    assert await worker.line() == "passed 3"
    assert await progress.hold(1) == 4
    worker.resume()
    await until(lambda: steps(progress) == {0: 4})
    assert not progress.stopped(0)
    assert progress.stop_at(4)
    assert await worker.line() == "saved"
    await worker.end()


async def test_after_an_expired_hold_workers_cannot_be_stopped_at_a_step(
    progress: WorkerProgress, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await script(COUNT, 3, 1, path=progress.path)
    assert await worker.line() == "passed 3"
    monkeypatch.setattr(worker_progress_module, "HOLD_TIMEOUT", 0.05)
    assert await progress.hold(1) == 4
    worker.resume()
    assert await worker.line() == "passed 4"
    assert not progress.stop_at(4)
    assert await worker.end() == 0
    assert not progress.stopped(0)


async def test_no_worker_is_held_if_one_does_not_report(progress: WorkerProgress) -> None:
    worker = await script(COUNT, 3, 1, path=progress.path)
    assert await worker.line() == "passed 3"
    assert await progress.hold(2) is None
    worker.resume()
    assert await worker.line() == "passed 4"
    await worker.end()


async def test_a_new_round_has_no_reports_and_refuses_workers_of_the_old_one(progress: WorkerProgress) -> None:
    worker = await script(COUNT, 3, 1, path=progress.path)
    assert await worker.line() == "passed 3"
    progress.begin_round(RoundId(1, 0, 2))
    late = await script(COUNT, 9, 1, path=progress.path)
    assert await late.line() == "passed 9"
    assert steps(progress) == {}
    assert await late.end() == await worker.end() == 0


CHILDREN = """
import multiprocessing, os, sys
import elasticjob
def other(step):
    elasticjob.progress(step)
if __name__ == "__main__":
    elasticjob.progress(1)
    for method in ("fork", "spawn"):
        child = multiprocessing.get_context(method).Process(target=elasticjob.progress, args=(50,))
        child.start()
        child.join()
        assert child.exitcode == 0
    print("done", flush=True)
    sys.stdin.readline()
    elasticjob.progress(2)
"""


async def test_processes_that_a_worker_starts_do_not_report(progress: WorkerProgress, tmp_path: Path) -> None:
    (tmp_path / "children.py").write_text(CHILDREN)
    worker = await script(f"import runpy; runpy.run_path({str(tmp_path / 'children.py')!r}, run_name='__main__')",
                          path=progress.path)  # fmt: skip
    assert await worker.line() == "done"
    assert steps(progress) == {0: 1}
    await progress.hold(1)
    assert progress.stop_at(2)
    assert await worker.end() == 0
    assert progress.stopped(0)


@pytest.mark.parametrize("path", ["", "/nowhere"])
async def test_without_an_agent_nothing_happens(path: str) -> None:
    worker = await script(COUNT, 3, 1, path=path)
    assert await worker.line() == "passed 3"
    assert await worker.end() == 0


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


HEARTBEATS = """
import atexit, os, sys
os.environ |= {"ELASTICJOB_STACK_DUMP_FILE": sys.argv[1], "ELASTICJOB_DETECT_HANGS": "1"}
atexit.register(lambda: (print("ending", flush=True), sys.stdin.readline()))
from elasticjob.training.progress_channel import heartbeat
heartbeat()
heartbeat()
print("trains", flush=True)
sys.stdin.readline()
"""


async def test_optimizer_steps_are_heartbeats_until_the_script_ends(progress: WorkerProgress, tmp_path: Path) -> None:
    worker = await script(HEARTBEATS, tmp_path / "stacks", path=progress.path)
    assert await worker.line() == "trains"
    (heartbeat,) = progress.heartbeats()
    assert (heartbeat.local_rank, heartbeat.step) == (0, 2)
    assert 0 <= time.monotonic() - heartbeat.time < 20
    assert progress.reports() == (), "a planned end needs reported steps"
    assert progress.has_steps
    worker.resume()
    assert await worker.line() == "ending"
    assert progress.heartbeats() == ()
    assert await worker.end() == 0


BEGINS = """
import sys
from elasticjob.training import progress_channel
progress_channel.report_begin(7)
for step in (7, 8):
    print("reported", flush=True)
    sys.stdin.readline()
    progress_channel.progress(step)
print("reported", flush=True)
sys.stdin.readline()
"""


async def test_the_step_at_which_a_round_begins_is_reported_but_not_made(progress: WorkerProgress) -> None:
    worker = await script(BEGINS, path=progress.path)
    made = []
    for _ in range(3):
        assert await worker.line() == "reported"
        made.append(progress.made_step(0))
        worker.resume()
    assert made == [False, False, True], "a callback may report the same step again before the first one"
    began = progress.began(0)
    assert began is not None
    assert began <= progress.heartbeats()[0].time
    assert (progress.made_step(1), progress.began(1)) == (False, None), "this worker does not report"
    assert await worker.end() == 0


ENDS = """
import sys
from elasticjob.training import progress_channel
progress_channel.report_begin(7)
print("began", flush=True)
sys.stdin.readline()
progress_channel.report_end(8, 8, {})
print("goes on", flush=True)
sys.stdin.readline()
"""


async def test_a_script_whose_training_is_over_goes_on_while_the_others_wait(progress: WorkerProgress) -> None:
    worker = await script(ENDS, path=progress.path)
    assert await worker.line() == "began"
    assert await progress.hold(1) == 8
    assert progress.stop_at(8)
    worker.resume()
    assert await worker.line() == "goes on"
    assert not progress.stopped(0)
    (report,) = progress.reports()
    assert (report.step, progress.made_step(0)) == (8, True)
    assert await worker.end() == 0


COUNTS = """
import sys
from elasticjob.training import progress_channel
progress_channel.report_begin(7)
progress_channel.heartbeat()
print("counted", flush=True)
sys.stdin.readline()
"""


async def test_a_step_that_is_only_counted_is_made(progress: WorkerProgress) -> None:
    """A script that assigns `State.step` and never calls `progress` is not taken for one that hangs."""
    worker = await script(COUNTS, path=progress.path)
    assert await worker.line() == "counted"
    assert progress.made_step(0)
    (report,), (heartbeat,) = progress.reports(), progress.heartbeats()
    assert (report.step, heartbeat.step) == (7, 8)
    assert heartbeat.time > report.time
    assert await worker.end() == 0


DESCRIBE = """
import sys
import elasticjob
class Loss:
    reads = 0
    def __float__(self):
        Loss.reads += 1
        return 0.25
for step in range(1, 5):
    elasticjob.progress(step, total=4, metrics={"loss": Loss(), "lr": 1e-4})
    print(Loss.reads, flush=True)
    sys.stdin.readline()
"""


async def test_rank_0_describes_the_training_and_reads_metrics_rarely(
    progress: WorkerProgress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    worker = await script(DESCRIBE, path=progress.path)
    assert await worker.line() == "1"
    metrics = (Metric("loss", "0.25"), Metric("lr", "0.0001"))
    assert progress.training() == TrainingProgress(ROUND, 1, 4, None, metrics)
    reads = []
    for _ in range(3):
        worker.resume()
        reads.append(int(await worker.line()))
    assert reads[-1] == reads[-2] + 1, "the last step's values are read"
    training = progress.training()
    assert training is not None
    assert (training.step, training.total, training.metrics) == (4, 4, metrics)
    assert training.step_seconds is not None
    await worker.end()


async def test_other_ranks_and_scripts_without_a_description_report_none(
    progress: WorkerProgress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    other = await script(DESCRIBE, path=progress.path, local_rank=1)
    assert await other.line() == "0", "its metrics are not read"
    monkeypatch.setenv("RANK", "0")
    plain = await script(COUNT, 0, 1, path=progress.path)
    assert await plain.line() == "passed 0"
    assert progress.training() is None
    for worker in (other, plain):
        await worker.end()


RECEIVES = """
import sys
from elasticjob.training import progress_channel
for seconds in (0.5, float("nan"), 0.0):
    progress_channel.report_received(1_000_000_000, seconds, "eth0")
progress_channel.progress(1)
print("done", flush=True)
sys.stdin.readline()
"""


async def test_a_rank_reports_the_state_that_it_has_received(
    progress: WorkerProgress, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is no speed, or of another round, is dropped. The rank's connection for its steps is another one."""
    received: list[StateReceived] = []
    progress.on_state_received = received.append
    monkeypatch.setenv("RANK", "5")
    for round_id in (RoundId(1, 0, 9), ROUND):
        worker = await script(RECEIVES, path=progress.path, round_id=round_id)
        assert await worker.line() == "done"
        assert await worker.end() == 0
    assert received == [StateReceived(ROUND, 5, 1_000_000_000, 0.5, "eth0")]


async def test_a_rank_without_an_agent_reports_nothing() -> None:
    worker = await script(RECEIVES)
    assert await worker.line() == "done"
    assert await worker.end() == 0


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("total=float('inf')", "TypeError: total is inf: use a whole number of steps, or leave it out"),
        (
            "metrics={'loss': 'low'}",
            "TypeError: the metric 'loss' is no number: could not convert string to float",
        ),
        ("metrics={str(n): n for n in range(1000)}", "ValueError: the metrics need"),
    ],
)
async def test_wrong_descriptions_are_refused(
    arguments: str, error: str, progress: WorkerProgress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    call = f"elasticjob.progress(1, {arguments})"
    text = f"import elasticjob\ntry:\n {call}\nexcept Exception as e:\n print(f'{{type(e).__name__}}: {{e}}')"
    worker = await script(text, path=progress.path)
    assert (await worker.line()).startswith(error)
    assert progress.training() is None
    await worker.end()
