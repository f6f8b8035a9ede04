"""Plans grow with the load and with tighter targets, read published traces, and repeat."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from services.planner.__main__ import faster, main, target, tier
from services.planner.planning import LatencyTarget, workers_needed
from services.planner.replay import Replayed, VirtualFleet
from services.planner.tiers import TierKind
from services.planner.trace import TraceError, TraceRequest, read_trace
from services.planner.workers import ReplayWorker, WorkerKind, request_of
from services.router.policies.registry import make_policy
from services.router.scaling.pools import ScheduledFloor
from services.worker.simulated.curve import CurvePoint, StepCurve

CURVE = StepCurve(
    machine="test",
    model="test",
    device="cpu",
    dtype="bfloat16",
    tensor_parallel=1,
    kv_tokens=8192,
    decode=(CurvePoint(rows=1, seconds=0.05), CurvePoint(rows=16, seconds=0.2)),
    decode_key_s=0.0,
    prefill=(CurvePoint(rows=16, seconds=0.1), CurvePoint(rows=512, seconds=1.0)),
    prefill_key_s=0.0,
)
KIND = WorkerKind(CURVE)


def drawn(seed: int, rate: float, n: int = 60) -> list[TraceRequest]:
    """Requests that come by chance; half of them share one of two prefixes."""
    rng, at, trace = random.Random(seed), 0.0, []
    for _ in range(n):
        at += rng.expovariate(rate)
        blocks = (rng.randrange(2) + 7,) if rng.random() < 0.5 else ()
        session = rng.choice(["", "a", "b"])
        trace.append(TraceRequest(at, rng.randrange(70, 200), rng.randrange(1, 12), blocks, session=session))
    return trace


def replay(trace: Sequence[TraceRequest], size: int, policy: str = "cost") -> Replayed:
    return VirtualFleet(KIND, make_policy(policy), size).run(trace)  # type: ignore[arg-type]


def shared(trace: Sequence[TraceRequest], n_workers: int, cores: int) -> Replayed:
    return VirtualFleet(WorkerKind(CURVE, shared_cores=cores), make_policy("round_robin"), n_workers).run(trace)


def needed(trace: Sequence[TraceRequest], *targets: str) -> int:
    need = workers_needed(trace, [target(each) for each in targets], replay, 12, window_s=5.0)
    assert need.workers is not None
    assert need.low is not None
    assert need.low <= need.workers
    assert need.high is None or need.workers <= need.high
    return need.workers


@pytest.mark.parametrize("policy", ["cost", "round_robin", "least_loaded", "session_hash"])
def test_replay_ends_every_request_once_and_repeats(policy: str) -> None:
    trace = drawn(1, 4.0)
    first, again = replay(trace, 3, policy), replay(trace, 3, policy)
    assert [outcome.at for outcome in first.outcomes] == [request.at for request in trace]
    assert all(outcome.first_token_s > 0 for outcome in first.outcomes)
    assert first == again


def test_more_load_never_needs_fewer_workers() -> None:
    trace = drawn(2, 1.0, 40)
    sizes = [needed(faster(trace, factor), "first_token_p95=1.5s", "pace_p95=300ms") for factor in (0.5, 2, 8)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]


def test_tighter_target_never_needs_fewer_workers() -> None:
    trace = drawn(3, 3.0, 40)
    sizes = [needed(trace, f"first_token_p95={seconds}s") for seconds in (30, 3, 1.5)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]
    assert needed(trace, "first_token_p95=3s", "pace_p95=200ms") >= sizes[1]


def test_workers_that_share_cores_do_the_work_of_as_many_workers() -> None:
    trace = [each.moved(0.0) for each in drawn(5, 1.0)]

    own = replay(trace, 4, "round_robin")
    assert shared(trace, 4, 4) == own
    assert shared(trace, 4, 2).span_s == pytest.approx(2 * own.span_s, rel=0.2)
    one_by_one = [TraceRequest(number * 30.0, 100, 3) for number in range(4)]
    assert shared(one_by_one, 4, 1) == replay(one_by_one, 4, "round_robin")


def test_step_slows_down_while_other_workers_compute_on_its_core() -> None:
    """Two prompts of 0.1 s, the second one 0.05 s later: the first has half of its work left, and half of the core."""
    trace = [TraceRequest(0.0, 16, 1), TraceRequest(0.05, 16, 1)]
    replayed = shared(trace, 2, 1)
    assert [each.first_token_s for each in replayed.outcomes] == pytest.approx([0.15, 0.15])
    assert replayed.span_s == pytest.approx(0.2)
    assert replayed.busy_s == pytest.approx(0.3)
    assert [each.first_token_s for each in shared(trace, 2, 2).outcomes] == pytest.approx([0.1, 0.1])


@pytest.mark.parametrize("cores", [1, 2])
def test_shared_cores_are_never_ahead_of_their_work(cores: int) -> None:
    """Steps of all lengths begin and end by chance: the cores do the whole work, and no more than they can."""
    trace = drawn(6, 4.0)
    work_s = replay(trace, 1, "round_robin").busy_s  # least work, as one worker has the largest batches
    replayed = shared(trace, 4, cores)
    assert len(replayed.outcomes) == len(trace)
    assert replayed.span_s >= work_s / cores


def test_prompt_counts_as_queued_until_computed() -> None:
    """A slow machine computes it in one step of seconds, in which the worker is not idle."""
    now = [0.0]
    worker = ReplayWorker("slow", KIND, lambda: now[0])
    source = TraceRequest(0.0, 100, 2)
    worker.submit(request_of(source, 1), source)
    (times,) = worker.progress.values()
    while times.first_at < 0:
        assert worker.state().queued_prefill_tokens == 100
        assert worker.wake_at is not None
        now[0] = worker.wake_at
        worker.wake()
    assert worker.state().queued_prefill_tokens == 0
    assert worker.computed_tokens == 100


def test_cost_serves_a_slow_fleet_no_worse_than_turns() -> None:
    """Few requests that each take long: whether a worker is idle decides, and turns hardly ever meet a busy one."""
    by_policy: dict[str, list[Replayed]] = {"cost": [], "round_robin": []}
    for seed in range(1, 4):
        rng, at, trace = random.Random(seed), 0.0, []
        for _ in range(80):
            at += rng.expovariate(1.0)
            trace.append(TraceRequest(at, rng.randrange(100, 400), rng.randrange(4, 16)))
        for policy, replays in by_policy.items():
            replays.append(replay(trace, 3, policy))
    for name in ("first_token_p95=1s", "pace_p95=1s"):
        by_cost, by_turn = (
            np.nanquantile(np.concatenate([target(name).values(each) for each in replays]), 0.95)
            for replays in by_policy.values()
        )
        assert by_cost <= 1.02 * by_turn


def test_shared_prefix_is_computed_once() -> None:
    same = [TraceRequest(number * 3.0, 640, 2, tuple(range(1, 11))) for number in range(8)]
    other = [TraceRequest(number * 3.0, 640, 2, tuple(range(number * 20, number * 20 + 10))) for number in range(8)]
    assert replay(same, 1).busy_s < replay(other, 1).busy_s / 2
    first, second = (request_of(one, number) for number, one in enumerate(same[:2]))
    assert first.token_ids[:640] == second.token_ids[:640]
    assert request_of(TraceRequest(0.0, 650, 2, (1,)), 1).token_ids[:64] == first.token_ids[:64]


def test_target_that_no_fleet_meets_has_no_size() -> None:
    need = workers_needed(drawn(4, 1.0, 8), [LatencyTarget("first_token", 0.5, 0.01)], replay, 3)
    assert need.workers is None
    assert need.measured == {}


def test_request_longer_than_the_cache_is_counted_and_hurts_no_other() -> None:
    trace = [TraceRequest(0.0, 9000, 2), TraceRequest(0.1, 100, 2)]
    replayed = replay(trace, 1)
    assert (replayed.too_long, len(replayed.outcomes)) == (1, 1)


@pytest.mark.parametrize(
    "wrong", ["first_token=1s", "pace_p95=", "pace_p0=1s", "pace_p101=1s", "first_token_p95=-1s", "p95=1s"]
)
def test_wrong_target_is_refused_by_its_text(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--target", wrong])
    assert ended.value.code == 2
    assert wrong in capsys.readouterr().err


MOONCAKE = [
    {"timestamp": 27482 + 400 * number, "input_length": 600, "output_length": 5, "hash_ids": [46 + number, number]}
    for number in range(12)
]
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,480,4\n2023-11-16 18:17:04.0,39,6\n"


def test_published_traces_are_read(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text("\n".join(map(json.dumps, MOONCAKE)))
    first = read_trace(path)[0]
    assert (first.at, first.prompt_tokens, first.answer_tokens, first.blocks) == (27.482, 600, 5, (46, 0))
    path.write_text(AZURE)
    first, second = read_trace(path)
    assert (first.prompt_tokens, first.answer_tokens) == (480, 4)
    assert second.at - first.at == pytest.approx(0.02004, abs=1e-6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no requests"),
        ('{"timestamp": 1}', "line 1: no field 'input_length'"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 1}', "line 1: a request has at least one token"),
        ('{"timestamp": 1', "line 1"),
        ("a,b\n1,2\n", "line 2: no field 'TIMESTAMP'"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,1\n", "line 2"),
    ],
)
def test_wrong_trace_is_refused_by_its_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(TraceError, match=message):
        read_trace(path)


def test_plan_of_a_file_compares_curves_and_policies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, slow, fast = tmp_path / "trace", tmp_path / "slow.json", tmp_path / "fast.json"
    trace.write_text("\n".join(map(json.dumps, MOONCAKE)))
    CURVE.write(slow)
    half = [point.model_copy(update={"seconds": point.seconds / 8}) for point in CURVE.prefill]
    CURVE.model_copy(update={"prefill": tuple(half)}).write(fast)
    options = ["--target", "first_token_p95=1.5s", "--curve", str(slow), "--curve", str(fast)]
    options += ["--policy", "cost", "--policy", "round_robin", "--price", "0.5", "--watts", "100"]
    assert main([str(trace), *options, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(Path(row["curve"]).name, row["policy"]) for row in rows] == [
        (curve, policy) for curve in ("slow.json", "fast.json") for policy in ("cost", "round_robin")
    ]
    assert rows[0]["need"]["workers"] > rows[2]["need"]["workers"]
    assert all(row["price"] == row["need"]["workers"] * 0.5 for row in rows)
    assert all(row["kilojoules"] == pytest.approx(row["need"]["workers"] * row["need"]["busy"] * 360) for row in rows)
    options = ["--target", "first_token_p95=0.5s", "--curve", str(slow), "--curve", str(fast), "--price", "0.5"]
    assert main([str(trace), *options, "--most", "2"]) == 1
    printed = capsys.readouterr().out
    assert "no fleet of --most workers meets the targets" in printed
    assert ("price" in printed, "0.50" in printed) == (True, True), "the hour with a plan has its price"


def test_schedule_of_a_plan_has_the_largest_need_of_each_hour_and_weekday(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hours of a week with few and with many requests; the second Monday needs more than the first."""
    trace, curve = tmp_path / "trace", tmp_path / "curve.json"
    CURVE.write(curve)
    n_requests = {"16 08": 1, "16 09": 40, "17 08": 1, "23 08": 40}  # 16 and 23 November 2026 are Mondays
    rows = [f"2026-11-{at}:00:{n / 4:06.3f}+00:00,200,4" for at, count in n_requests.items() for n in range(count)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    options = [str(trace), "--target", "first_token_p95=1s", "--curve", str(curve), "--schedule"]
    assert main(options) == 0
    printed = json.loads(capsys.readouterr().out)
    floors = [ScheduledFloor.model_validate(each) for each in printed]
    assert [(floor.hour, floor.days) for floor in floors] == [(8, ("mon",)), (8, ("tue",)), (9, ("mon",))]
    second_monday, few, many = (floor.min for floor in floors)
    assert few == 1 < second_monday == many
    assert main([*options, "--most", "1"]) == 1, "hours without a plan have no floor to print"
    failed = capsys.readouterr()
    assert (failed.out, failed.err.count("2026-11-")) == ("", 2)
    assert "no fleet of --most workers meets the targets: 2026-11-16 09:00, 2026-11-23 08:00" in failed.err


def test_schedule_without_hours_or_with_several_variants_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace"
    trace.write_text("\n".join(map(json.dumps, MOONCAKE)))
    options = [str(trace), "--target", "first_token_p95=1s", "--schedule"]
    assert main(options) == 2
    assert "times count from its begin" in capsys.readouterr().err
    assert main([*options, "--policy", "cost", "--policy", "round_robin"]) == 2
    assert "expected one curve, one policy and one tier" in capsys.readouterr().err


def returning(n_prefixes: int) -> list[TraceRequest]:
    """Prefixes that come twice, each a kilotoken; all others come between."""
    prompts = [tuple(range(1000 * prefix, 1000 * prefix + 16)) for prefix in range(n_prefixes)]
    return [TraceRequest(3.0 * number, 1030, 2, blocks) for number, blocks in enumerate(prompts * 2)]


def with_tier(trace: Sequence[TraceRequest], tier: TierKind | None, size: int = 1) -> Replayed:
    return VirtualFleet(WorkerKind(CURVE, tier=tier), make_policy("cost"), size).run(trace)


def test_tier_that_holds_returning_prefixes_saves_their_computation() -> None:
    trace = returning(12)  # 12,288 tokens; the KV cache holds 8,192
    without = with_tier(trace, None)
    kinds = (TierKind(50_000, 1e5), TierKind(64, 1e5), TierKind(50_000, 50))
    large, small, slow = (with_tier(trace, kind) for kind in kinds)
    assert large.busy_s < 0.7 * without.busy_s
    assert small.busy_s == slow.busy_s == without.busy_s
    half = len(trace) // 2
    assert all(
        fast.first_token_s < usual.first_token_s
        for fast, usual in zip(large.outcomes[half:], without.outcomes[half:], strict=True)
    )
    assert len(with_tier(trace, TierKind(50_000, 1e5), 3).outcomes) == len(trace)


def test_loads_of_a_tier_take_their_time_and_end_every_request() -> None:
    """The second pass comes at once: loads wait for each other, for room, and for the same blocks."""
    trace = [each.moved(min(each.at, 36.0)) for each in returning(12) for _ in range(2)]
    for tokens_per_s in (1e3, 1e4, 1e6):
        replayed = with_tier(trace, TierKind(50_000, tokens_per_s))
        assert len(replayed.outcomes) == len(trace)
        assert all(outcome.first_token_s > 0 for outcome in replayed.outcomes)


def test_plan_of_a_file_compares_tiers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, curve = tmp_path / "trace", tmp_path / "curve.json"
    CURVE.write(curve)
    lines = [
        {"timestamp": 1500 * n, "input_length": 1030, "output_length": 2, "hash_ids": [2 * (n % 12), 2 * (n % 12) + 1]}
        for n in range(36)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    options = [str(trace), "--target", "first_token_p50=1s", "--curve", str(curve)]
    options += ["--tier", "none", "--tier", "50000@100000"]
    assert main([*options, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["tier"] for row in rows] == ["none", "50000@100000"]
    assert rows[0]["need"]["workers"] > rows[1]["need"]["workers"]
    assert main(options) == 0
    assert "tier" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", ["", "1000", "1000@", "@5", "1000@0", "all"])
def test_wrong_tier_is_refused_by_its_text(wrong: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected"):
        tier(wrong)
