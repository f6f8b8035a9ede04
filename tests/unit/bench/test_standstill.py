"""A standstill is seen in the time in which it was, and a probe that may not run is not taken for a quiet machine."""

import os
import signal
import time

import psutil
import pytest

from bench.standstill import LATE_S, Watch, watch

HELD_S = 0.2


def until_watching(machine: Watch) -> None:
    """Until the probe has its priority and sleeps again and again, or has ended for want of the right to it."""
    probe, end = machine.probes[0], time.monotonic() + 30
    while probe.poll() is None and os.sched_getscheduler(probe.pid) != os.SCHED_FIFO:
        assert time.monotonic() < end
        time.sleep(0.01)
    if probe.poll() is not None:
        pytest.skip("real-time priority takes root")
    switches = psutil.Process(probe.pid).num_ctx_switches
    slept_before = switches().voluntary
    while switches().voluntary < slept_before + 10:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_delayed_probe_counts_only_its_own_time() -> None:
    with watch([min(os.sched_getaffinity(0))]) as machine:
        until_watching(machine)
        began = time.perf_counter()
        machine.probes[0].send_signal(signal.SIGSTOP)
        time.sleep(HELD_S)
        machine.probes[0].send_signal(signal.SIGCONT)
        ended = time.perf_counter()
        while not machine.held_up_ms(began, ended):  # it wakes and writes
            time.sleep(0.01)
        seen = machine.held_up_ms(began, ended)
        half = machine.held_up_ms(began + HELD_S / 2, ended)
        nothing = machine.held_up_ms(began - HELD_S, began)
    assert seen is not None
    assert half is not None
    assert nothing is not None
    assert seen >= (HELD_S - 2 * LATE_S) * 1e3
    assert half < seen <= (ended - began) * 1e3
    assert nothing < seen


def test_held_up_time_is_unknown_without_a_probe(capfd: pytest.CaptureFixture[str]) -> None:
    with watch([100_000]) as machine:
        machine.probes[0].wait(30)
        assert machine.held_up_ms(0.0, time.perf_counter()) is None
    assert "standstills of core 100000 are not seen" in capfd.readouterr().err
