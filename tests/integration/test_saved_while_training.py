"""`elasticjob.State(save_minutes=...)`: the agent of the first node saves copies while training continues."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from elasticjob._runtime.contract import codec
from elasticjob._runtime.contract.messages import RoundSettings
from elasticjob._runtime.contract.names import Env
from elasticjob._runtime.contract.snapshot_format.state_file import read_file_header
from elasticjob._runtime.system.code_root import CODE_ROOT
from support.agent.worker_scripts import script
from support.common.child_process import ChildProcess
from support.local.run import PROGRAM

pytestmark = pytest.mark.torch

AGENT_THAT_LOOKS_EARLIER = """
import functools, sys
from elasticjob._runtime.agent.main import main
from elasticjob._runtime.agent.reporting.state_saver import StateSaver
StateSaver.run = functools.partialmethod(StateSaver.run, check_interval=0.01)  # not after a minute
sys.exit(main(sys.argv[1:]))
"""
COMMITS_TWICE = """
import os, sys, time
import torch
import elasticjob
from elasticjob._runtime.contract.snapshot_format.state_file import read_file_header

folder, rank = sys.argv[1], os.environ["RANK"]
state = elasticjob.State(model=torch.nn.Linear(2, 2), path=f"{folder}/state-{rank}", save_minutes=0.001)
for step in (5, 7):
    state.step = step
    state.commit()
    while read_file_header(f"{folder}/state-0").step < step:  # training goes on until the agent has saved this step
        time.sleep(0.01)
print("both were saved", flush=True)
"""


def test_the_first_node_saves_each_commit_while_training_continues(tmp_path: Path) -> None:
    keys = {Env.RUN_ID: "run", Env.NODE_KEY: "00" * 32, Env.OPERATOR_KEY: "11" * 32, "PYTHONPATH": CODE_ROOT}
    environ = {**os.environ, **keys, Env.PORT: "0", Env.SETTINGS: codec.dumps(RoundSettings(2, 2, 2)).decode()}
    with ExitStack() as processes:
        store = processes.enter_context(ChildProcess([*PROGRAM, "store"], env=environ))
        port = store.wait_for(r"serving on port (\d+)")[1]
        agents = []
        for index in range(2):
            node = {
                Env.INDEX: str(index), Env.POD_NAME: f"j-{index}-0", Env.POD_IP: "127.0.0.1", Env.PRELOAD: "",
                Env.STORE_ENDPOINT: f"127.0.0.1:{port}", Env.TERMINATION_LOG: str(tmp_path / f"end-{index}"),
            }  # fmt: skip
            command = [sys.executable, "-c", AGENT_THAT_LOOKS_EARLIER, *script(tmp_path, COMMITS_TWICE), str(tmp_path)]
            agents.append(processes.enter_context(ChildProcess(command, env={**environ, **node}, new_session=True)))
        assert [agent.exit_code(100) for agent in agents] == [0, 0]
    assert all("both were saved" in agent.text for agent in agents)
    saves = [agent.text.count(f"training state saved to {tmp_path / 'state-0'}") for agent in agents]
    assert sorted(saves) == [0, 2], [agent.text for agent in agents]
    assert read_file_header(str(tmp_path / "state-0")).step == 7
    assert not (tmp_path / "state-1").exists(), "the other node saves nothing while it trains"
