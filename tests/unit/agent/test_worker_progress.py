"""Workers report their steps to the agent's side of the channel, and stop where it says: real processes."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from elasticjob.agent.monitoring import worker_progress as ranks_module
from elasticjob.agent.monitoring.worker_progress import WorkerProgress
from elasticjob.code_root import CODE_ROOT
from elasticjob.contract.names import Env, RoundId

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
    """A worker that goes on by one line of input at a time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def heard(self) -> str:
        assert self._process.stdout is not None
        return (await asyncio.wait_for(self._process.stdout.readline(), 20)).decode().strip()

    def go_on(self) -> None:
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
async def ranks(tmp_path: Path) -> AsyncIterator[WorkerProgress]:
    found = WorkerProgress(tmp_path)
    found.begin_round(ROUND)
    yield found
    found.close()


def steps(ranks: WorkerProgress) -> dict[int, int]:
    return {report.local_rank: report.step for report in ranks.reports()}


async def test_the_agent_sees_each_workers_latest_step_and_its_time(ranks: WorkerProgress) -> None:
    before, met = asyncio.get_running_loop().time(), list[None]()
    ranks.on_worker_connected = lambda: met.append(None)
    workers = [await script(COUNT, 5 + rank, 10, path=ranks.path, local_rank=rank) for rank in range(2)]
    assert [await w.heard() for w in workers] == ["passed 5", "passed 6"]
    assert steps(ranks) == {0: 5, 1: 6}
    assert all(before < report.time < asyncio.get_running_loop().time() for report in ranks.reports())
    workers[1].go_on()
    assert await workers[1].heard() == "passed 16"
    assert steps(ranks) == {0: 5, 1: 16}
    assert len(met) == 2
    for worker in workers:
        await worker.end()


async def test_workers_save_and_stop_at_the_first_report_of_the_last_step_or_a_later_one(ranks: WorkerProgress) -> None:
    workers = [await script(COUNT, 0, stride, path=ranks.path, local_rank=stride - 1) for stride in (1, 2)]
    assert [await w.heard() for w in workers] == ["passed 0", "passed 0"]
    assert await ranks.hold(2) == 1
    for worker in workers:
        worker.go_on()
    assert ranks.stop_at(2)
    assert await workers[0].heard() == "passed 1"
    workers[0].go_on()
    for worker in workers:
        assert await worker.heard() == "saved"
        assert await worker.end() == 0
    assert steps(ranks) == {0: 2, 1: 2}
    assert ranks.stopped(0)
    assert ranks.stopped(1)


CLEANS_UP = """
import atexit, sys
import elasticjob
class Part:
    def __del__(self):
        print("taken apart")
part = Part()
atexit.register(print, "and out")
elasticjob.progress(0)
print("waits", flush=True)
sys.stdin.readline()
try:
    elasticjob.progress(1)
finally:
    print("cleaned up", end=" ")
"""


async def test_a_worker_that_stops_runs_its_own_clean_up_and_no_more(ranks: WorkerProgress) -> None:
    worker = await script(CLEANS_UP, path=ranks.path)
    assert await worker.heard() == "waits"
    assert await ranks.hold(1) == 1
    assert ranks.stop_at(1)
    worker.go_on()
    assert [await worker.heard(), await worker.heard()] == ["cleaned up and out", ""]
    assert await worker.end() == 0


async def test_a_held_worker_waits_for_the_last_step_to_be_named(ranks: WorkerProgress) -> None:
    worker = await script(COUNT, 3, 1, path=ranks.path)
    assert await worker.heard() == "passed 3"
    assert await ranks.hold(1) == 4
    worker.go_on()
    await until(lambda: steps(ranks) == {0: 4})
    assert not ranks.stopped(0)
    assert ranks.stop_at(4)
    assert await worker.heard() == "saved"
    await worker.end()


async def test_a_hold_ends_by_itself_and_with_it_the_promise(
    ranks: WorkerProgress, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await script(COUNT, 3, 1, path=ranks.path)
    assert await worker.heard() == "passed 3"
    monkeypatch.setattr(ranks_module, "HOLD_TIMEOUT", 0.05)
    assert await ranks.hold(1) == 4
    worker.go_on()
    assert await worker.heard() == "passed 4"
    assert not ranks.stop_at(4)
    assert await worker.end() == 0
    assert not ranks.stopped(0)


async def test_nobody_is_held_where_a_worker_does_not_report(ranks: WorkerProgress) -> None:
    worker = await script(COUNT, 3, 1, path=ranks.path)
    assert await worker.heard() == "passed 3"
    assert await ranks.hold(2) is None
    worker.go_on()
    assert await worker.heard() == "passed 4"
    await worker.end()


async def test_a_new_round_begins_without_reports_and_a_worker_of_the_old_one_is_not_met(ranks: WorkerProgress) -> None:
    worker = await script(COUNT, 3, 1, path=ranks.path)
    assert await worker.heard() == "passed 3"
    ranks.begin_round(RoundId(1, 0, 2))
    late = await script(COUNT, 9, 1, path=ranks.path)
    assert await late.heard() == "passed 9"
    assert steps(ranks) == {}
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


async def test_processes_that_a_worker_starts_do_not_report(ranks: WorkerProgress, tmp_path: Path) -> None:
    (tmp_path / "children.py").write_text(CHILDREN)
    worker = await script(f"import runpy; runpy.run_path({str(tmp_path / 'children.py')!r}, run_name='__main__')",
                          path=ranks.path)  # fmt: skip
    assert await worker.heard() == "done"
    assert steps(ranks) == {0: 1}
    await ranks.hold(1)
    assert ranks.stop_at(2)
    assert await worker.end() == 0
    assert ranks.stopped(0)


@pytest.mark.parametrize("path", ["", "/nowhere"])
async def test_without_an_agent_nothing_happens(path: str) -> None:
    worker = await script(COUNT, 3, 1, path=path)
    assert await worker.heard() == "passed 3"
    assert await worker.end() == 0


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


SIGNS = """
import atexit, os, sys
os.environ["ELASTICJOB_STACK_DUMP_FILE"] = sys.argv[1]
atexit.register(lambda: (print("ending", flush=True), sys.stdin.readline()))
from elasticjob.training.progress_channel import heartbeat
heartbeat()
heartbeat()
print("trains", flush=True)
sys.stdin.readline()
"""


async def test_steps_of_an_optimizer_are_signs_of_life_until_the_program_is_over(
    ranks: WorkerProgress, tmp_path: Path
) -> None:
    worker = await script(SIGNS, tmp_path / "stacks", path=ranks.path)
    assert await worker.heard() == "trains"
    (sign,) = ranks.heartbeats()
    assert (sign.local_rank, sign.step) == (0, 2)
    assert 0 <= time.monotonic() - sign.time < 20
    assert ranks.reports() == (), "nothing that a round could be ended by"
    worker.go_on()
    assert await worker.heard() == "ending"
    assert ranks.heartbeats() == ()
    assert await worker.end() == 0
