"""The command `elasticjob-operator`. It imports the operator last, which takes a second.

The first process of a container ignores a signal without a handler: an operator that is deleted while it starts would
live on for its whole grace period, and might lead meanwhile.
"""

from __future__ import annotations

import signal
import sys


def main() -> int:
    """Run the operator; SIGTERM ends the process from the beginning on."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    from elasticjob_operator.__main__ import main as run

    return run()
