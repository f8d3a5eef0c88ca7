"""Recovery where each node has an address of its own: `python -m benchmarks.between_addresses ROW FOLDER`.

On the loopback address a round's store serves every worker at once, because the worker has the store's own address. On
a cluster each node has another one. These rows run in network namespaces, which needs root. The output is one sample as
JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import recovery
from benchmarks.network import own_addresses
from benchmarks.ours import Ours
from benchmarks.row import OURS, Row, Sample
from benchmarks.run import exit_on_sigterm
from benchmarks.side import TRAIN, TRAIN_IN_PROCESS, Side

ROOT = Path(__file__).parents[1]
CAP = 300.0
"""Time limit of a sample, in seconds."""


@dataclass(frozen=True)
class _Measured:
    title: str
    script: str
    how: Callable[[Side], Sample]
    want: float


def _in_process(title: str, how: Callable[[Side], Sample], want: float, replaced: int = 0) -> _Measured:
    kept = recovery.nothing_lost(how, replaced)
    return _Measured(f"in process, between addresses: {title}", TRAIN_IN_PROCESS, kept, want)


MEASURED: Mapping[str, _Measured] = {
    "killed-addresses": _Measured("between addresses: worker killed", TRAIN, recovery.worker_killed, 0.3),
    "killed-in-process-addresses": _in_process("worker killed", recovery.worker_killed, 0.15, replaced=1),
    "raises-in-process-addresses": _in_process("worker raises an exception", recovery.worker_raises, 0.15),
}
"""By name of the row. No other library is measured: their stores know no addresses."""


def _row(name: str, measured: _Measured) -> Row:
    def once(folder: Path) -> Sample:
        if os.geteuid() or not shutil.which("ip"):
            raise RuntimeError("network namespaces need root and the program ip")
        argv = ["unshare", "--net", sys.executable, "-m", "benchmarks.between_addresses", name, str(folder)]
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=CAP, check=False)
        if done.returncode:
            return Sample(None, done.stderr.strip()[-300:])
        return Sample(**json.loads(done.stdout))

    return Row(name, measured.title, "s", measured.want, {OURS: once}, {OURS: 3}, 60)


ROWS = [_row(name, measured) for name, measured in MEASURED.items()]


def main() -> None:
    measured, folder = MEASURED[sys.argv[1]], Path(sys.argv[2])
    exit_on_sigterm()
    command = [sys.executable, measured.script, str(folder)]
    with own_addresses(folder) as network, Ours(folder, command=command, network=network) as side:
        sample = measured.how(side)
    print(json.dumps(asdict(sample)))


if __name__ == "__main__":
    main()
