"""Server-sent events out of bytes that arrive in any pieces (WHATWG HTML, section 9.2.6)."""

from __future__ import annotations

import re

_LINE_END = re.compile(rb"\r\n|\r|\n")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class SseParser:
    """Feed it bytes, get the data of the events that they complete.

    Event names, ids and reconnection times are read over: the API uses data only. An event without its closing blank
    line is never returned, as the standard wants it.
    """

    def __init__(self) -> None:
        self._rest = b""  # beginning of a line without its end
        self._data: list[bytes] = []  # data lines of the event to come
        self._first_line = True
        self._after_return = False  # a line feed that comes now belongs to the line before

    def feed(self, data: bytes) -> list[str]:
        """The data of each event that is complete now."""
        if not data:
            return []
        if self._after_return:
            data = data.removeprefix(b"\n")
        self._after_return = data.endswith(b"\r")
        *lines, self._rest = _LINE_END.split(self._rest + data)
        events = (self._line(line) for line in lines)
        return [event for event in events if event is not None]

    def _line(self, line: bytes) -> str | None:
        if self._first_line:
            self._first_line = False
            line = line.removeprefix(_BYTE_ORDER_MARK)
        if not line:
            data, self._data = self._data, []
            return b"\n".join(data).decode("utf-8", "replace") if data else None
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
        return None
