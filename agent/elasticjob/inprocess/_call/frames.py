"""Release what the frames of an exception refer to."""

from __future__ import annotations

import traceback


def forget_frames(error: BaseException) -> None:
    """Free the local variables of an exception's frames: models and process groups of the iteration that ended."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__
