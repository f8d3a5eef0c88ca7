"""Log lines for people (text) or for machines (json)."""

from __future__ import annotations

import json
import logging
import sys

from elasticjob_operator.model.raw import timestamp


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": timestamp(record.created, precise=True),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure(level: str, style: str) -> None:
    """Log to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    plain = logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if style == "json" else plain)
    logging.basicConfig(level=level, handlers=[handler], force=True)
    # kopf tells of every event and every watch at INFO.
    for noisy in ("kopf", "kubernetes", "aiohttp"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, logging.getLevelName(level)))
    # It warns that it does not take the process's signals: it must not.
    logging.getLogger("kopf._core.reactor.running").setLevel(logging.ERROR)
