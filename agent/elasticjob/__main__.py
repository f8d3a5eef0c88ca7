"""Run `python -m elasticjob`, or `python path/to/elasticjob` without an installation."""

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).parents[1])

from elasticjob.cli import main

if __name__ == "__main__":
    sys.exit(main())
