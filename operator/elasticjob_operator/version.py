"""The version of this distribution."""

from __future__ import annotations

from elasticjob import __version__ as VERSION  # noqa: N812

__all__ = ["VERSION"]
