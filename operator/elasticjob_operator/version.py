"""The version of this distribution."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("elasticjob")
except PackageNotFoundError:
    VERSION = "0.1.0"
