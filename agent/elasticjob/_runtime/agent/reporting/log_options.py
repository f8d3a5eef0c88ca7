"""torchrun's log options: whether workers' output goes to the console, to files, or to both. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from string import Template

NOTHING, STDOUT, STDERR, BOTH = range(4)
"""torch's `Std`: the bits of the streams in `redirects` and `tee`."""
PREFIX = "[${role_name}${rank}]:"


@dataclass(frozen=True)
class LogOptions:
    """The log options of a pod. Unlike torchrun's console lines, these always have a prefix.

    In `redirects` and `tee` the key is a local rank; None is for ranks without a key.
    """

    directory: str = ""
    redirects: Mapping[int | None, int] = field(default_factory=dict)
    """Streams written to files only."""
    tee: Mapping[int | None, int] = field(default_factory=dict)
    """Streams written to the console and to files."""
    ranks: frozenset[int] | None = None
    """Local ranks whose output goes to the console; None: all."""
    prefix: str = PREFIX

    def to_console(self, local_rank: int, stream: int) -> bool:
        """Return whether a worker's STDOUT or STDERR goes to the console."""
        redirected = _of(self.redirects, local_rank) & stream and not _of(self.tee, local_rank) & stream
        return not redirected and (self.ranks is None or local_rank in self.ranks)

    def to_file(self, local_rank: int, stream: int) -> bool:
        """Return whether a worker's STDOUT or STDERR goes to a file."""
        return bool((_of(self.redirects, local_rank) | _of(self.tee, local_rank)) & stream)

    def has_tee(self, local_rank: int, stream: int) -> bool:
        """Return whether a worker's STDOUT or STDERR goes to the console and to a file."""
        return bool(_of(self.tee, local_rank) & stream)

    @property
    def writes_files(self) -> bool:
        """Whether the output of any worker goes to a file."""
        return any((*self.redirects.values(), *self.tee.values()))

    def path(self, pod: str, round_id: str, local_rank: int, stream: int) -> Path:
        """Return the path of a log file; no other pod, round or worker has the same."""
        return Path(self.directory, pod, round_id, str(local_rank), "stdout.log" if stream == STDOUT else "stderr.log")

    def line_prefix(self, *, role: str, local_rank: int, rank: int, hostname: str) -> str:
        names = {"role_name": role, "local_rank": local_rank, "rank": rank, "hostname": hostname}
        return Template(self.prefix).safe_substitute(names)


def _of(streams: Mapping[int | None, int], local_rank: int) -> int:
    return streams.get(local_rank, streams.get(None, NOTHING))


def read_streams(text: str) -> dict[int | None, int]:
    """Parse `3` (all local ranks) or `0:1,1:2` (LOCAL_RANK:STREAMS); ValueError names the valid values."""
    try:
        if ":" not in text:
            found: dict[int | None, int] = {None: int(text)}
        else:
            found = {int(rank): int(value) for rank, value in (item.split(":") for item in text.split(","))}
    except ValueError:
        found = {None: -1}
    if not all(NOTHING <= value <= BOTH for value in found.values()):
        raise ValueError("want 0 (none), 1 (stdout), 2 (stderr), 3 (both), or LOCAL_RANK:NUMBER,...")
    return found


def read_ranks(text: str) -> frozenset[int] | None:
    """Parse local ranks such as `0,3`; None, for all ranks, when empty."""
    try:
        return frozenset(int(word) for word in text.split(",")) if text else None
    except ValueError:
        raise ValueError("want local ranks: 0,3") from None


def with_launcher_options(base: LogOptions, given: Mapping[str, str]) -> LogOptions:
    """Return the options of a launcher's ranks: those that it was `given`, by long names, and else those of the pod.

    ValueError names what is wrong.
    """
    options = base
    if text := given.get("redirects"):
        options = replace(options, redirects=read_streams(text))
    if text := given.get("tee"):
        options = replace(options, tee=read_streams(text))
    if text := given.get("local-ranks-filter"):
        options = replace(options, ranks=read_ranks(text))
    options = replace(
        options,
        directory=given.get("log-dir") or options.directory,
        prefix=given.get("log-line-prefix-template") or options.prefix,
    )
    if options.writes_files and not options.directory:
        raise ValueError("--redirects and --tee need a folder for log files: mount a volume at /tmp, or set --log-dir")
    return options
