"""Log formats: text, or one JSON object a line."""

from __future__ import annotations

import json
import logging
import sys

from elasticjob_operator.model.cluster.raw import timestamp


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object on one line."""

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
    """Log to standard error. `level` is a name such as INFO; `style` is text or json."""
    handler = logging.StreamHandler(sys.stderr)
    plain = logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if style == "json" else plain)
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for noisy in ("kopf", "kubernetes", "aiohttp"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, logging.getLevelName(level)))
