"""Unmodified loops with accelerate and Fabric tell the agent their steps, losses and logged metrics."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from elasticjob._runtime.agent.start_workers.in_workers import sitecustomize

pytestmark = pytest.mark.torch

START = 240
"""Seconds for the imports of a framework on a busy machine."""
BEGIN = """
import sys, torch

def model_and_adam():
    model = torch.nn.Linear(2, 1)
    return model, torch.optim.Adam(model.parameters())

def loss_of(model):
    return model(torch.ones(4, 2)).square().mean() * 0 + 0.5

model, adam = model_and_adam()
for _ in range(40):  # what a checkpoint has
    loss_of(model).backward()
    adam.step()
saved = adam.state_dict()
model, adam = model_and_adam()
"""
ACCELERATE = (
    BEGIN
    + """
from accelerate import Accelerator

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
other = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, other = accelerator.prepare(model, adam, other)
optimizer.load_state_dict(saved)
for batch in range(7):
    accelerator.log({"accuracy": torch.tensor(0.25), "note": "text"}, step=batch)
    with accelerator.accumulate(model):
        accelerator.backward(loss_of(model))
        optimizer.step()
        optimizer.zero_grad()
    if batch == 3:
        other.step()
"""
)
FABRIC = (
    BEGIN
    + """
from {package} import Fabric

fabric = Fabric(accelerator="cpu", devices=1)
fabric.launch()
model, optimizer = fabric.setup(model, adam)
optimizer.load_state_dict(saved)
for step in range(3):
    fabric.log("accuracy", torch.tensor(0.25, requires_grad=True))
    fabric.backward(loss_of(model))
    optimizer.step()
    optimizer.zero_grad()
"""
)


class Agent:
    """Takes the requests of one worker."""

    def __init__(self, folder: Path) -> None:
        self.reports: list[dict[str, str]] = []
        agent = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                status = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                agent.reports.append({m["name"]: m["value"] for m in status["trainerStatus"]["metrics"]})
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        self.token = folder / "token"
        self.token.write_text("secret")
        self.server = HTTPServer(("127.0.0.1", 0), Handler)

    def run(self, script: Path) -> list[dict[str, str]]:
        """Run a script as a worker of this agent; return what it reports."""
        thread = threading.Thread(target=self.server.serve_forever, args=(0.05,))
        thread.start()
        env = os.environ | {
            "PYTHONPATH": str(Path(sitecustomize.__file__).parent),
            "ELASTICJOB_WORLD": "RANK=0 WORLD_SIZE=1 LOCAL_WORLD_SIZE=1",
            "RANK": "0",
            "KUBEFLOW_TRAINER_SERVER_URL": f"http://127.0.0.1:{self.server.server_port}/status",
            "KUBEFLOW_TRAINER_SERVER_TOKEN": str(self.token),
        }
        try:
            subprocess.run([sys.executable, script], env=env, check=True, timeout=START)
        finally:
            self.server.shutdown()
            thread.join()
        return self.reports


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(ACCELERATE, id="accelerate"),
        pytest.param(FABRIC.replace("{package}", "lightning.fabric"), id="fabric"),
        pytest.param(FABRIC.replace("{package}", "lightning_fabric"), id="lightning_fabric", marks=pytest.mark.deep),
    ],
)
def test_a_loop_that_has_loaded_a_checkpoint_shows_its_steps_and_metrics(tmp_path: Path, source: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(source)
    agent = Agent(tmp_path)
    with agent.server:
        first, *_, last = agent.run(script)
    metrics = {"loss": "0.5", "accuracy": "0.25"}
    assert first == {"current_step": "41"} | metrics
    assert last == {"current_step": "43"} | metrics
