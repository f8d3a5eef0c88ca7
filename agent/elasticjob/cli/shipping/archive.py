"""Pack a folder: the same files give the same bytes, whatever their times, owners and order on the disk."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from elasticjob._runtime.contract.shipped_code import MAX_FILES, MAX_PACKED, MAX_UNPACKED, archive_digest
from elasticjob._runtime.contract.text import with_noun
from elasticjob.cli.shipping.errors import SubmitError
from elasticjob.cli.shipping.ignore import IGNORE_FILE, VENV_MARK, IgnoreRules

SHOWN_FILES = 5


@dataclass(frozen=True)
class CodeArchive:
    """The code of a job as it is shipped."""

    data: bytes
    """A tar archive, compressed by gzip."""
    files: int
    """How many files it has."""

    @property
    def digest(self) -> str:
        """Hexadecimal sha256 of the data."""
        return archive_digest(self.data)

    def summary(self) -> str:
        """Return what is shipped, in words."""
        return f"{with_noun(self.files, 'file')}, {size_text(len(self.data))}, sha256 {self.digest[:12]}"


def pack_folder(root: Path) -> CodeArchive:
    """Return the archive of a folder. SubmitError: it is too large, or a file cannot be read or shipped."""
    rules = IgnoreRules.parse(_read_text(root / IGNORE_FILE))
    try:
        found = sorted(islice(_walk(root, "", rules), MAX_FILES + 1))
    except OSError as error:
        raise SubmitError(f"{error.filename}: {error.strerror}") from None
    if len(found) > MAX_FILES:
        raise SubmitError(f"{root} has more than {MAX_FILES} files: choose a smaller folder with --code")
    if (size := sum(size for _, size in found)) > MAX_UNPACKED:
        raise SubmitError(_too_large(root, size, MAX_UNPACKED, "", [(size, path) for path, size in found]))
    files = [(path, read_file(root / path), os.access(root / path, os.X_OK)) for path, _ in found]
    return pack_files(files, str(root))


def pack_files(files: Sequence[tuple[str, bytes, bool]], root: str) -> CodeArchive:
    """Return the archive of (relative path, content, whether it may be executed). `root`: for the error's text.

    SubmitError: the archive is too large.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path, content, executable in sorted(files):
            member = tarfile.TarInfo(path)
            member.size, member.mode = len(content), 0o755 if executable else 0o644
            tar.addfile(member, io.BytesIO(content))
    data = gzip.compress(buffer.getvalue(), 9, mtime=0)
    if len(data) > MAX_PACKED:
        sizes = [(len(gzip.compress(content, 1)), path) for path, content, _ in files]
        raise SubmitError(_too_large(Path(root), len(data), MAX_PACKED, " compressed", sizes))
    return CodeArchive(data, len(files))


def size_text(size: int) -> str:
    """Return a number of bytes such as `12 KiB` or `3.4 MiB`."""
    if size < 1 << 10:
        return f"{size} bytes"
    return f"{size / (1 << 10):.0f} KiB" if size < 1 << 20 else f"{size / (1 << 20):.1f} MiB"


def _walk(root: Path, folder: str, rules: IgnoreRules) -> Iterator[tuple[str, int]]:
    """Yield (relative path, bytes) of the files that are shipped."""
    with os.scandir(root / folder) as entries:
        for entry in entries:
            path = f"{folder}/{entry.name}" if folder else entry.name
            if rules.ignores(path, is_folder=entry.is_dir()):
                continue
            if entry.is_dir():
                if Path(entry.path, VENV_MARK).exists():
                    continue
                if entry.is_symlink():
                    raise SubmitError(f"{path} is a link to a folder: add it to {IGNORE_FILE}, or replace it by a copy")
                yield from _walk(root, path, rules)
            elif entry.is_file():
                yield path, entry.stat().st_size
            elif entry.is_symlink():
                raise SubmitError(f"{path} is a link to nothing: remove it, or add it to {IGNORE_FILE}")


def _too_large(root: Path, size: int, limit: int, kind: str, sizes: Sequence[tuple[int, str]]) -> str:
    biggest = ", ".join(f"{path} ({size_text(size)})" for size, path in sorted(sizes, reverse=True)[:SHOWN_FILES])
    return (
        f"the code in {root} has {size_text(size)}{kind}, and at most {size_text(limit)} can be shipped. The biggest"
        f" files: {biggest}. List what the job does not need in {IGNORE_FILE}, choose a smaller folder with --code, or"
        f" put data into a volume or the image"
    )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise SubmitError(f"{path}: {error}") from None


def read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SubmitError(f"{path}: {error.strerror}") from None
