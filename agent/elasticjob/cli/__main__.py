"""Run `python -m elasticjob.cli`."""

import sys

from elasticjob.cli import main

if __name__ == "__main__":
    sys.exit(main())
