"""A hook of mkdocs: links to files outside of docs/ lead to the repository, and sequence diagrams become pictures.

DOCS_REPOSITORY has the address of the repository; without it such a link becomes the name of the file.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from posixpath import dirname, join, normpath
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # mkdocs loads this file by its path
from site_sequences import with_pictures

_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(((?:\.\./)+[^)\s#]*)(#[^)]*)?\)")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Return the page with its links to other parts of the repository replaced; raise ValueError for one to nothing."""
    root = Path(config["docs_dir"]).parent

    def replace(match: re.Match[str]) -> str:
        path = normpath(join("docs", dirname(page.file.src_uri), match[2]))
        if path.startswith("docs/"):
            return match[0]
        if not (root / path).exists():
            raise ValueError(f"{page.file.src_uri} has a link to {path}, which does not exist")
        if repository := os.environ.get("DOCS_REPOSITORY"):
            return f"[{match[1]}]({repository}/blob/main/{path}{match[3] or ''})"
        return match[1] if path in match[1] else f"{match[1]} (`{path}`)"

    return with_pictures(_LINK.sub(replace, markdown))
