"""What `elasticjob submit` and the agent agree on about code that is shipped without an image build.

`submit` writes a tar archive, compressed by gzip, into a ConfigMap that the job owns. The manifest mounts it read-only,
and a writable volume as the working directory of the trainer. The agent unpacks the one into the other before anything
else starts.
"""

from __future__ import annotations

import hashlib

from elasticjob._runtime.contract.names import GROUP

CODE_SHA256 = f"{GROUP}/code-sha256"
"""Annotation of a job and of its ConfigMap: hexadecimal digest of the archive."""
ARCHIVE = "code.tar.gz"
"""Key of the ConfigMap, and name of its file."""
ARCHIVE_FOLDER = "/elasticjob-code/archive"
"""Where the ConfigMap is mounted."""
CODE_FOLDER = "/elasticjob-code/files"
"""Where the code is unpacked: the working directory of the workers."""
MAX_PACKED = 900 << 10
"""Bytes of an archive. A ConfigMap may have 1 MiB, of which its names need some."""
MAX_UNPACKED = 64 << 20
"""Bytes of all files of an archive."""
MAX_FILES = 5000
"""Files of an archive. A folder with more is hardly the code of a job: it may be a home directory."""
MAX_TAR = MAX_UNPACKED + MAX_FILES * (4 << 10)
"""Bytes of an archive without its compression: each file has a header, perhaps one with a long name, and padding."""


def code_config_map(job: str) -> str:
    """Return the name of the ConfigMap with the job's code."""
    return f"{job}-code"


def archive_digest(archive: bytes) -> str:
    """Return the digest of an archive as the annotation has it."""
    return hashlib.sha256(archive).hexdigest()
