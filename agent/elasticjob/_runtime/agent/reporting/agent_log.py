"""The agent's own lines, among the output of its workers."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from elasticjob._runtime.agent.reporting.worker_output import OutputSink
from elasticjob._runtime.contract.text import printable


@contextmanager
def logging_to(sink: OutputSink, pod: str) -> Iterator[None]:
    """Write the agent's log to the sink of the workers' stderr, which never blocks the event loop.

    After an error the handler stays: the error is logged, too.
    """
    handler, logger = _SinkHandler(sink, pod), logging.getLogger("elasticjob")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield
    logger.removeHandler(handler)


class _SinkHandler(logging.Handler):
    def __init__(self, sink: OutputSink, pod: str) -> None:
        super().__init__()
        self._sink = sink
        self._pod = pod

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info:
            text = f"{text}\n{''.join(traceback.format_exception(*record.exc_info)).rstrip()}"
        self._sink.put(f"[agent] {self._pod}: {printable(text)}\n".encode(errors="replace"))
