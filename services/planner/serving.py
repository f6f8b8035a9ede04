"""`GET /v1/plan`: the newest plan, made anew again and again, for autoscalers that ask over HTTP."""

from __future__ import annotations

import json
import logging
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from services.planner.rows import PlanRow, schedule
from services.planner.trace import TraceError
from services.router.scaling.pools import START_AHEAD, ScheduledFloor
from services.worker.simulated.curve import CurveError

PATH = "/v1/plan"

log = logging.getLogger(__name__)


class PlanBoard:
    """The newest plan. One thread writes it, others read."""

    def __init__(self, most: int, clock: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        """`most`: the floor of an hour that no fleet can serve."""
        self._most, self._clock = most, clock
        self._plan: dict[str, object] = {}
        self._floors: Sequence[ScheduledFloor] = ()
        self._error = "no plan has been made yet"

    def renew(self, plan: Callable[[], Sequence[PlanRow]]) -> None:
        """Make a plan; the one before stays if that fails."""
        try:
            rows = plan()
        except (CurveError, TraceError) as error:
            log.warning("no new plan: %s", error)
            self._error = str(error)
            return
        floors = schedule(rows, self._most)
        self._floors = [ScheduledFloor.model_validate(floor) for floor in floors]
        unplanned = [row.hour for row in rows if row.need.workers is None]
        made_at = self._clock().isoformat(timespec="seconds")
        self._plan, self._error = {"made_at": made_at, "schedule": floors, "unplanned": unplanned}, ""

    def answer(self) -> tuple[HTTPStatus, dict[str, object]]:
        """The status and the body: `workers` is the floor now, or of the hour that begins soon; 0 without one."""
        if not self._plan:
            return HTTPStatus.SERVICE_UNAVAILABLE, {"error": self._error}
        now = self._clock()
        floors = (floor.min for floor in self._floors if floor.holds(now) or floor.holds(now + START_AHEAD))
        return HTTPStatus.OK, {"workers": max(floors, default=0), **self._plan, "error": self._error}


@contextmanager
def serving(board: PlanBoard, host: str, port: int) -> Iterator[int]:
    """Answer requests in threads of their own; yields the port, which 0 leaves to the system. Raises OSError."""

    class PlanHandler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.path.partition("?")[0] == PATH
            status, body = board.answer() if known else (HTTPStatus.NOT_FOUND, {"error": f"there is {PATH} only"})
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base's name
            log.debug(format, *args)

    with ThreadingHTTPServer((host, port), PlanHandler) as server:
        thread = Thread(target=server.serve_forever, name="plan", daemon=True)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def serve(plan: Callable[[], Sequence[PlanRow]], most: int, host: str, port: int, every_s: float) -> None:
    """Serve a plan that is made anew every `every_s`, until SIGTERM or SIGINT ends the process. Raises OSError."""
    board = PlanBoard(most)
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: sys.exit(0))
    with serving(board, host, port):
        while True:
            board.renew(plan)
            time.sleep(every_s)
