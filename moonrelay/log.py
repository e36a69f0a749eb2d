"""One event per line as JSON on stderr: constant message, fields in `extra`. Never prompts or tokens."""

from __future__ import annotations

import json
import logging
import sys
import time

_PLAIN = set(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    def __init__(self, role: str) -> None:
        super().__init__()
        self.role = role

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname,
            "role": self.role,
            "event": record.getMessage(),
        }
        line.update({k: v for k, v in record.__dict__.items() if k not in _PLAIN})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure(role: str, level: str = "INFO") -> None:
    """Send every logger's lines to stderr; called once by a role's main."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(role))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level)
