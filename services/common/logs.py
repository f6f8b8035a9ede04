"""JSON lines on stdout, with the trace and request ids of the current context."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from contextvars import ContextVar
from types import MappingProxyType

from opentelemetry import trace

request_id_var: ContextVar[str] = ContextVar("request_id", default="")

# Attributes of every LogRecord. All others were passed as `extra=` and belong in the line, except uvicorn's
# `color_message`, which is for terminals.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, service, logger, message, ids and extra fields."""

    def __init__(self, service: str, fields: Mapping[str, object] = MappingProxyType({})) -> None:
        super().__init__()
        self._service = service
        self._fields = fields

    def format(self, record: logging.LogRecord) -> str:
        """Render a record; an exception becomes the field `error`."""
        line: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
            **self._fields,
        }
        if request_id := request_id_var.get():
            line["request_id"] = request_id
        context = trace.get_current_span().get_span_context()
        if context.is_valid:
            line["trace_id"] = f"{context.trace_id:032x}"
        line |= {key: value for key, value in vars(record).items() if key not in _STANDARD}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure_logging(service: str, level: str, **fields: object) -> None:
    """Send the root logger's records to stdout as JSON lines; `fields` are added to every line."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(JsonFormatter(service, fields))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
