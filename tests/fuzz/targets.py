"""What reads data of others, each with valid inputs and the errors by which it refuses data."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import random
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from elasticjob._runtime.agent.monitoring.exits.worker_exits import read_error_file
from elasticjob._runtime.agent.monitoring.progress.worker_progress import WorkerProgress
from elasticjob._runtime.agent.reporting.log_watch import LogWatch
from elasticjob._runtime.agent.reporting.worker_output import LineSplitter
from elasticjob._runtime.agent.shipped_code import CodeError, unpack_archive
from elasticjob._runtime.contract import codec
from elasticjob._runtime.contract import messages as m
from elasticjob._runtime.contract.log_rules.rules import LogRuleError, decode_log_rules
from elasticjob._runtime.contract.names import RoundId
from elasticjob._runtime.contract.snapshot_format import state_block, state_file
from elasticjob._runtime.control_link.frames import MACS, FrameProtocol, LinkError
from elasticjob._runtime.local.manifest.manifest import ManifestError, load_manifest, parse_local_job
from elasticjob._runtime.store import wire
from elasticjob._runtime.store.reader import KnownRequests, RequestReader
from elasticjob._runtime.store.wire import Op
from elasticjob.cli.shipping.archive import pack_files
from elasticjob.convert.documents import parse_documents
from elasticjob.convert.main import convert_documents
from elasticjob.convert.parts.fields import ConvertError
from elasticjob_operator.manifests.evictions import answered_status
from elasticjob_operator.model.cluster.evictions import RESPONDER, parse_eviction
from elasticjob_operator.model.job.job_defaults import PlatformDefaults, read_platform_defaults
from elasticjob_operator.model.observed import parse_job
from fuzz.mutations import mutate, mutate_object

ROUND = RoundId(1, 0, 1)
START = m.StartRound(ROUND, 0, 2, 0, 4, 0, 4, "10.0.0.1", 4000, 0, 3)
FAILURE = m.Failure(m.FailureClass.KILLED, "bert-0-0", 1.5, rank=3, signal="SIGKILL", message="out of memory")
SETTINGS = m.RoundSettings(min_nodes=2, max_nodes=4, target=3)
MESSAGES: Sequence[m.Message] = (
    m.Announce(0, 0, "b", "bert-0-0", "10.0.0.1", 4000, 2, membership=m.LastMembership(START, m.MemberState.RUNNING)),
    m.WorkersFailed(ROUND, FAILURE),
    START,
    m.EndRound(ROUND, 1.0, "because"),
    m.OperatorView(1, 2, SETTINGS, 0, ROUND, (m.ExpectedPod(0, 0, "bert-0-0", m.PodState.RUNNING),)),
    m.Report(0, m.RoundPhase.RUNNING, "formed", ROUND, 1, 4, 2.0),
    m.StepTimes(ROUND, 0.5, (0.1, 0.2)),
)
EXAMPLES = Path(__file__).parents[2] / "examples"
PYTORCHJOB = """
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: bert}
spec:
  elasticPolicy: {minReplicas: 1, maxReplicas: 4, nProcPerNode: 8, maxRestarts: 3, rdzvBackend: c10d}
  runPolicy: {backoffLimit: 3, cleanPodPolicy: None, ttlSecondsAfterFinished: 60}
  pytorchReplicaSpecs:
    Worker:
      replicas: 2
      restartPolicy: OnFailure
      template:
        spec:
          containers:
          - {name: pytorch, image: bert, command: [torchrun, train.py], resources: {limits: {nvidia.com/gpu: 8}}}
"""
DEFAULTS = """
cluster:
  preload: [torch, numpy]
  hangPolicy: {progressTimeoutSeconds: 600, action: Event}
  ttlSecondsAfterFinished: 60
  rendezvous: {store: {nodeSelector: {pool: cpu}, resources: {limits: {memory: 1Gi}}, tolerations: [{key: a}]}}
namespaces:
  team-a:
    elasticPolicy: {spares: 1}
    template: {spec: {priorityClassName: batch}}
    failurePolicy: {rules: [{name: oom, action: FailJob, onReasons: [OOMKilled]}]}
"""


@dataclass(frozen=True)
class Target:
    """One reader of data."""

    name: str
    refusals: tuple[type[BaseException], ...]
    """What it raises for data that it refuses. Any other error is a crash."""
    open: Callable[[Path], Any]
    """A context manager: returns a function that lets the reader read an input that `rng` chooses. `Path`: a folder."""


Read = Callable[[random.Random], object]


@contextmanager
def _store_wire(_: Path) -> Iterator[Read]:
    valid = [
        wire.request(Op.LINK, number=2),
        wire.request(Op.VALIDATE, number=wire.MAGIC) + wire.request(Op.CANCEL_WAIT),
        *(path for path in _requests()),
    ]

    def read(rng: random.Random) -> None:
        reader = RequestReader(wire.Limits(), KnownRequests())
        for _ in range(rng.randint(1, 3)):
            reader.feed(mutate(rng.choice(valid), rng))
            while reader.next() is not None:
                pass

    yield read


def _requests() -> Iterator[bytes]:
    text = struct.pack("<Q", 3) + b"key"
    for op in Op:
        for fields in (text, text * 2, text * 3, struct.pack("<Q", 1) + text, text + struct.pack("<q", 5)):
            yield bytes([op]) + fields


class _Transport:
    def abort(self) -> None: ...
    def close(self) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


@contextmanager
def _control_frames(_: Path) -> Iterator[Read]:
    loop = asyncio.new_event_loop()
    valid = [struct.pack("<I", len(data)) + data for data in map(m.encode, MESSAGES)]
    valid += [struct.pack(">I", len(data)) + data for data in map(m.encode, MESSAGES)]

    async def receive(frames: FrameProtocol, objects: bool) -> None:
        while frames.waiting or frames.error:
            await (frames.receive_object() if objects else frames.receive())

    def read(rng: random.Random) -> None:
        frames = FrameProtocol()
        frames.connection_made(_Transport())  # type: ignore[arg-type]
        if rng.random() < 0.3:
            frames.protect(rng.choice(MACS), send_key=b"k" * 32, receive_key=b"k" * 32)
        for _ in range(rng.randint(1, 3)):
            frames.data_received(mutate(rng.choice(valid), rng))
        loop.run_until_complete(receive(frames, objects=rng.random() < 0.5))

    try:
        yield read
    finally:
        loop.close()


@contextmanager
def _codec(_: Path) -> Iterator[Read]:
    valid = list(map(m.encode, MESSAGES))

    def read(rng: random.Random) -> None:
        m.encode(m.decode(mutate(rng.choice(valid), rng)))

    yield read


@contextmanager
def _termination(_: Path) -> Iterator[Read]:
    valid = codec.dumps(m.Termination(m.Outcome.FAILED, "MaxRestartsExceeded", ROUND, "failed", FAILURE))
    yield lambda rng: codec.parse(m.Termination, codec.loads(mutate(valid, rng)))


@contextmanager
def _error_file(folder: Path) -> Iterator[Read]:
    trace = 'Traceback (most recent call last):\n  File "/app/train.py", line 3, in <module>\nValueError: bad\n'
    valid = json.dumps({"message": {"message": "ValueError: bad", "extraInfo": {"py_callstack": trace}}}).encode()
    path = folder / "error.json"

    def read(rng: random.Random) -> None:
        path.write_bytes(mutate(valid, rng))
        read_error_file(str(path))

    yield read


@contextmanager
def _progress_page(folder: Path) -> Iterator[Read]:
    loop = asyncio.new_event_loop()
    text = b'{"total":100,"metrics":{"loss":"0.5"}}'

    async def open_progress() -> WorkerProgress:
        return WorkerProgress(folder, 1)

    progress = loop.run_until_complete(open_progress())
    progress.begin_round(ROUND)
    page = progress.rank_of(0).page
    length = os.fstat(page).st_size

    def read(rng: random.Random) -> None:
        os.pwrite(page, mutate(bytes(256), rng)[:256], 0)
        changed = mutate(text, rng)[: length - 256]
        os.pwrite(page, struct.pack("=qq", 2, rng.choice((len(changed), -1, 1 << 62))), 8 * 11)
        os.pwrite(page, changed, 256)
        progress.set_deadline(rng.choice((0.0, 1e300, -1e300, float("inf"))))
        for message in (progress.training(),):
            if message is not None:
                m.decode(m.encode(message))
        progress.reports(), progress.heartbeats(), progress.has_steps, progress.began(0), progress.stopped(0)

    try:
        yield read
    finally:
        progress.close()
        loop.close()


@contextmanager
def _state_block(folder: Path) -> Iterator[Read]:
    content = json.dumps({"path": str(folder / "state"), "save_minutes": 5, "parts": {}}).encode()
    header = state_block.HEADER.pack(state_block.MAGIC, 1, 1, len(content), 64 + len(content))
    valid = header.ljust(64, b"\0") + content

    def read(rng: random.Random) -> None:
        with (folder / "memory").open("w+b", buffering=0) as memory:
            memory.write(mutate(valid, rng))
            state_file.recorded_interval([memory.fileno()])
            if state_block.read_header(memory.fileno()) is not state_block.ABSENT:
                state_block.read_content(memory.fileno(), state_block.read_header(memory.fileno()))

    yield read


@contextmanager
def _manifests(folder: Path) -> Iterator[Read]:
    valid = [path.read_bytes() for path in sorted(EXAMPLES.glob("*.yaml"))]
    parsed = [next(d for d in yaml.safe_load_all(text) if d and d.get("kind") == "ElasticJob") for text in valid]
    path = folder / "job.yaml"

    def read(rng: random.Random) -> None:
        if rng.random() < 0.8:
            parse_local_job(mutate_object(rng.choice(parsed), rng))
        else:
            path.write_bytes(mutate(rng.choice(valid), rng))
            parse_local_job(load_manifest(str(path)))

    yield read


@contextmanager
def _log_rules(_: Path) -> Iterator[Read]:
    rules: list[dict[str, Any]] = [
        {
            "name": "iteration",
            "pattern": r"iteration +(?P<step>\d+)/ *(?P<total>\d+) .*loss: (?P<loss>[^|\s]+)(?: \| (?:\w+: )?)*",
            "localRanks": "First",
            "conditions": [{"metric": "loss", "above": 3.5, "forSeconds": 1, "action": "RestartGroup"}],
        },
        {"name": "metric", "pattern": r"^(?i:(?:a|b)+|step)=(?P<step>\S+?)(?P<speed>[-+.e0-9]{1,9})?$"},
    ]
    lines = (
        b" iteration     120/ 500 | lm loss: 1.08E+01 | x: 1\r\nstep=12 nan\nABab=1e-5\n\xff step=\xc3\xa9 1_0\n" * 3
    )

    def read(rng: random.Random) -> None:
        raw = mutate_object(rules, rng) if rng.random() < 0.5 else rules
        if rng.random() < 0.3:
            pattern = mutate(rules[rng.randint(0, 1)]["pattern"].encode(), rng).decode(errors="replace")
            raw = [{"name": "changed", "pattern": pattern}]
        watch, splitter, failures = LogWatch("bert-0-0"), LineSplitter(), list[m.Failure]()
        watch.on_condition = lambda met: failures.append(codec.parse(m.Failure, codec.loads(codec.dumps(met.failure))))
        watch.begin_round(replace(START, log_rules=decode_log_rules(raw)))
        for rank in (0, 1):
            watch.feed(ROUND, rank, splitter.feed(mutate(lines, rng)) + splitter.end())
        if (found := watch.training()) is not None:
            m.decode(m.encode(found))

    yield read


class RefusedDefaultsError(Exception):
    """Defaults of a platform have a mistake."""


@contextmanager
def _platform_defaults(_: Path) -> Iterator[Read]:
    parsed = yaml.safe_load(DEFAULTS)
    job = next(d for d in yaml.safe_load_all((EXAMPLES / "digits.yaml").read_text()) if d["kind"] == "ElasticJob")

    def read(rng: random.Random) -> None:
        if rng.random() < 0.8:
            text = json.dumps(mutate_object(parsed, rng))
        else:
            text = mutate(DEFAULTS.encode(), rng).decode(errors="replace")
        found = read_platform_defaults(text, PlatformDefaults())
        parse_job(job, found.of("team-a"))
        if found.problems:
            raise RefusedDefaultsError

    yield read


@contextmanager
def _converter(_: Path) -> Iterator[Read]:
    parsed = yaml.safe_load(PYTORCHJOB)

    def read(rng: random.Random) -> None:
        if rng.random() < 0.8:
            text = json.dumps(mutate_object(parsed, rng))
        else:
            text = mutate(PYTORCHJOB.encode(), rng).decode(errors="replace")
        convert_documents(parse_documents(text, "input"), "input")

    yield read


class UnrelatedEvictionError(Exception):
    """An Eviction does not concern the operator."""


@contextmanager
def _evictions(_: Path) -> Iterator[Read]:
    since = "2026-01-01T00:00:00Z"
    valid = {
        "metadata": {"name": "bert-0-0", "uid": "e"},
        "spec": {"target": {"pod": {"name": "bert-0-0", "uid": "u"}}},
        "status": {
            "requesters": [{"name": "example.org/upgrade", "intent": "Eviction"}],
            "targetResponders": [{"name": RESPONDER, "state": "Active"}],
            "responders": [{"name": RESPONDER, "startTime": since, "heartbeatTime": since}],
        },
    }

    def read(rng: random.Random) -> None:
        eviction = parse_eviction(mutate_object(valid, rng))
        if eviction is None:
            raise UnrelatedEvictionError
        answered_status(eviction.raw, 1.8e9, "bert-0-0 has ended", completed=True)

    yield read


@contextmanager
def _shipped_code(folder: Path) -> Iterator[Read]:
    packed = pack_files([("train.py", b"print(1)", True), ("a/b.py", b"x" * 600, False)], "").data
    plain, inside = gzip.decompress(packed), folder / "files"

    def read(rng: random.Random) -> None:
        archive = mutate(packed, rng) if rng.random() < 0.3 else gzip.compress(mutate(plain, rng), 1)
        try:
            unpack_archive(archive, inside)
        finally:
            shutil.rmtree(inside, ignore_errors=True)
            assert not list(folder.iterdir())

    yield read


TARGETS = (
    Target("TCPStore requests", (wire.WireError,), _store_wire),
    Target("frames of the control link", (LinkError,), _control_frames),
    Target("messages of the control link", (codec.MessageError,), _codec),
    Target("termination messages", (codec.MessageError,), _termination),
    Target("error files", (), _error_file),
    Target("progress pages", (), _progress_page),
    Target("blocks of State", (OSError, ValueError), _state_block),
    Target("rules for the output of workers, and their lines", (LogRuleError,), _log_rules),
    Target("manifests of `elasticjob run`", (ManifestError,), _manifests),
    Target("manifests of `elasticjob convert`", (ConvertError,), _converter),
    Target("a platform's defaults for jobs", (RefusedDefaultsError,), _platform_defaults),
    Target("Evictions", (UnrelatedEvictionError,), _evictions),
    Target("shipped code", (CodeError, OSError), _shipped_code),
)


@contextmanager
def opened(target: Target) -> Iterator[Read]:
    """Return the target's function, with a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="elasticjob-fuzz-") as folder, target.open(Path(folder)) as read:
        yield read
