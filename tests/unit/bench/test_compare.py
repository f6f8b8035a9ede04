"""A comparison of servers keeps what it has measured, whatever happens to one of them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from rich.console import Console

from bench.compare import Entry, Scenario, compare, show
from bench.compare_report import markdown
from bench.serve import Load
from bench.servers import Asked, Peer
from bench.standstill import watch

SERVER = """
import http.server, signal, sys

signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell runs in the background ignores it

class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply(b'{"data": [{"id": "m"}]}')

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.reply(b'data: {"choices": [{"text": "a", "finish_reason": null}]}\\n\\n' * 4)

    def reply(self, body):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words):
        pass

http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Answers).serve_forever()
"""
EMPTY = SERVER.replace('[{"id": "m"}]', "[]")


async def test_a_failed_server_start_keeps_the_results_of_other_servers(tmp_path: Path) -> None:
    for name, source in (
        ("ryzanstein", SERVER),
        ("other", SERVER),
        ("broken", "raise SystemExit(3)"),
        ("empty", EMPTY),
    ):
        (tmp_path / f"{name}.py").write_text(source)
    peers = {
        name: Peer(name, f"{sys.executable} {{home}}/{name}.py {{port}}", "/health")
        for name in ("broken", "ryzanstein", "empty", "other")
    } | {"missing": Peer("missing", "{home}/nothing", "/health")}
    loads = (Scenario("two requests", Load(2, 1, 8, 4)),)
    with watch(sorted(os.sched_getaffinity(0))[:1]) as machine:
        entries = [Entry(peer, str(tmp_path), Asked("m")) for peer in peers.values()]
        results = (await compare(entries, loads, 1, tmp_path, machine, 0))["bf16"] | {"format": "bf16"}
    assert set(results["start_s"]) == set(results["scenarios"]["two requests"]) == {"ryzanstein", "other"}
    assert results["scenarios"]["two requests"]["other"][0]["errors"] == 0
    assert set(results["failed"]) == {"broken", "empty", "missing"}
    assert "ended with status 3" in results["failed"]["broken"][0]
    shown = Console(record=True, width=200)
    show(results, shown)
    assert "broken round 1: RuntimeError" in shown.export_text()
    assert "two requests" in markdown(results | {"shape": "1m"})
