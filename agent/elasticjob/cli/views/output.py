"""Where a verb writes: text for a person, or its view as JSON or YAML."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TextIO

from elasticjob._runtime.contract.text import printable
from elasticjob.cli.views.style import Painter, wants_colour


class VerbOutput:
    """Writes to `stream`; notes go to `notes`, so that a program can read `stream`."""

    def __init__(self, form: str | None, stream: TextIO | None = None, notes: TextIO | None = None) -> None:
        """`form`: `json` or `yaml`; None: text."""
        self.form = form
        self._stream = sys.stdout if stream is None else stream
        self._notes = sys.stderr if notes is None else notes
        self.painter = Painter(form is None and wants_colour(self._stream, os.environ))

    def show(self, view: Any, text: Callable[[Painter], Iterable[str]]) -> None:
        """Write a view: `text` returns its lines for a person."""
        if self.form == "json":
            self.line(json.dumps(view, indent=2, ensure_ascii=False))
        elif self.form == "yaml":
            self.line(_yaml(view).rstrip("\n"))
        else:
            for line in text(self.painter):
                self.line(line)

    def line(self, text: str) -> None:
        """Write one line at once, and flush it: a reader may follow."""
        self._stream.write(text + "\n")
        self._stream.flush()

    def note(self, text: str) -> None:
        """Write a line to standard error, after what was written before it."""
        self._stream.flush()
        self._notes.write(printable(text) + "\n")
        self._notes.flush()


def _yaml(view: Any) -> str:
    import yaml

    return str(yaml.safe_dump(view, sort_keys=False, allow_unicode=True, width=120))


def without_empty(view: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that have a value; 0 and False are values."""
    return {key: value for key, value in view.items() if value not in (None, "", [], {}, ())}
