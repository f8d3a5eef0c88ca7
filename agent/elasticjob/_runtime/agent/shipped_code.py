"""The code that `elasticjob submit` has shipped: unpacked before the agent reads its command, and updated later.

A round names the digest of its code, and an agent starts its workers only with that code: so no round has two versions,
also where a pod joins, or comes back, while the code changes. The bytes come from the mounted ConfigMap alone.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from elasticjob._runtime.contract.shipped_code import ARCHIVE, ARCHIVE_FOLDER, CODE_FOLDER, MAX_TAR, archive_digest

POLL_SECONDS = 0.05
"""How often the mounted file is read while a round waits for it: the kubelet tells nobody."""
MOUNT_SECONDS = 150.0
"""How long a round waits. A kubelet that was not hurried renews a ConfigMap within about 90 s."""


class CodeError(Exception):
    """The shipped code is not there or cannot be unpacked; the message says why."""


class ShippedCode:
    """The code of this pod. A job without any has no archive, and its digest is empty."""

    def __init__(self, archive: Path = Path(ARCHIVE_FOLDER, ARCHIVE), folder: Path = Path(CODE_FOLDER)) -> None:
        self.digest = ""
        """Of the archive that is unpacked; empty: none is."""
        self._archive = archive
        self._folder = folder
        self._names: frozenset[str] = frozenset()

    def unpack(self) -> None:
        """Unpack the archive if the job has shipped one.

        CodeError: it cannot be read, is not an archive of plain files below its root, or the folder cannot be written.
        """
        if self._archive.exists():
            self._unpack(self._read())

    def differs(self, digest: str) -> bool:
        """Return whether a round with this code needs an `update`."""
        return digest not in ("", self.digest)

    async def update(self, digest: str, given_up: Callable[[], bool]) -> bool:
        """Wait until the archive with this digest is mounted, and unpack it. No worker may run.

        Return False if `given_up` holds first. CodeError: it does not come in time, or as for `unpack`.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + MOUNT_SECONDS
        while (archive_digest(data := self._read())) != digest:
            if given_up():
                return False
            if loop.time() >= end:
                raise CodeError(
                    f"the round has the code {digest[:12]}, and {self._archive} is still {archive_digest(data)[:12]}"
                    f" after {MOUNT_SECONDS:g} s: run elasticjob submit --update again, or delete this pod"
                )
            await asyncio.sleep(POLL_SECONDS)
        self._unpack(data)
        return True

    def _read(self) -> bytes:
        try:
            return self._archive.read_bytes()
        except OSError as error:
            raise CodeError(f"the shipped code {self._archive} cannot be read: {error.strerror}") from None

    def _unpack(self, data: bytes) -> None:
        try:
            names = unpack_archive(data, self._folder)
            for name in self._names - names:
                _remove(self._folder / name)
        except OSError as error:
            text = f"the shipped code cannot be unpacked in {self._folder}: {error.strerror or error}"
            raise CodeError(text) from None
        self.digest, self._names = archive_digest(data), names


def unpack_archive(archive: bytes, folder: Path) -> frozenset[str]:
    """Write the files of an archive below `folder` and return their names.

    CodeError: it is not an archive of plain files below its root.
    """
    files = list(_files(archive))
    for name, content, executable in files:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        # A file that somebody runs or has open keeps its content, because the new one is another file.
        _remove(target)
        target.write_bytes(content)
        target.chmod(0o755 if executable else 0o644)
    return frozenset(name for name, _, _ in files)


def _remove(file: Path) -> None:
    """Remove a file, and what Python has compiled of it: it may be as old and as long as the next one."""
    file.unlink(missing_ok=True)
    if file.suffix == ".py":
        for compiled in file.parent.glob(f"__pycache__/{file.stem}.*.pyc"):
            compiled.unlink(missing_ok=True)


def _files(archive: bytes) -> Iterator[tuple[str, bytes, bool]]:
    """Yield (relative path, content, whether it may be executed) of each file."""
    import gzip  # only here: most agents have no code to unpack, and start faster without these
    import tarfile
    import zlib

    try:
        data = gzip.GzipFile(fileobj=io.BytesIO(archive)).read(MAX_TAR + 1)
        if len(data) > MAX_TAR:
            raise CodeError(f"the shipped code has more than the {MAX_TAR} bytes that may be unpacked")
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
            for member in tar:
                path = PurePosixPath(member.name)
                if path.is_absolute() or ".." in path.parts or "\0" in member.name or not member.isfile():
                    raise CodeError(f"the shipped code has {member.name!r}, which is no plain file below its root")
                file = tar.extractfile(member)
                yield member.name, file.read() if file else b"", bool(member.mode & 0o100)
    except (tarfile.TarError, zlib.error, EOFError, OSError, ValueError) as error:
        raise CodeError(f"the shipped code is no tar archive compressed by gzip: {error}") from None
