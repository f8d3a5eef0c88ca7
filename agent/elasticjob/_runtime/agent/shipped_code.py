"""Unpack the code that `elasticjob submit` has shipped, before the agent reads its command."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from elasticjob._runtime.contract.shipped_code import ARCHIVE, ARCHIVE_FOLDER, CODE_FOLDER, MAX_UNPACKED, archive_digest


class CodeError(Exception):
    """The shipped code is not there or cannot be unpacked; the message says why."""


def unpack_shipped_code(archive: Path = Path(ARCHIVE_FOLDER, ARCHIVE), folder: Path = Path(CODE_FOLDER)) -> str:
    """Unpack the archive into the folder; return its digest, or "" if the job has shipped no code.

    CodeError: it cannot be read, it is no archive of plain files below its root, or the folder cannot be written.
    """
    if not archive.exists():
        return ""
    try:
        data = archive.read_bytes()
    except OSError as error:
        raise CodeError(f"the shipped code {archive} cannot be read: {error.strerror}") from None
    try:
        unpack_archive(data, folder)
    except OSError as error:
        raise CodeError(f"the shipped code cannot be unpacked in {folder}: {error.strerror or error}") from None
    return archive_digest(data)


def unpack_archive(archive: bytes, folder: Path) -> None:
    """Write the files of an archive below `folder`. CodeError: it is no archive of plain files below its root."""
    for name, content, executable in list(_files(archive)):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        # A file that somebody runs or has open keeps its content, because the new one is another file.
        target.unlink(missing_ok=True)
        target.write_bytes(content)
        target.chmod(0o755 if executable else 0o644)


def _files(archive: bytes) -> Iterator[tuple[str, bytes, bool]]:
    """Yield (relative path, content, whether it may be executed) of each file."""
    import gzip  # only here: most agents have no code to unpack, and start faster without these
    import tarfile

    try:
        data = gzip.GzipFile(fileobj=io.BytesIO(archive)).read(MAX_UNPACKED + (1 << 20))
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
            for member in tar:
                path = PurePosixPath(member.name)
                if path.is_absolute() or ".." in path.parts or not member.isfile():
                    raise CodeError(f"the shipped code has {member.name!r}, which is no plain file below its root")
                file = tar.extractfile(member)
                yield member.name, file.read() if file else b"", bool(member.mode & 0o100)
    except (tarfile.TarError, EOFError, gzip.BadGzipFile) as error:
        raise CodeError(f"the shipped code is no tar archive compressed by gzip: {error}") from None
