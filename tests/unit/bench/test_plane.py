"""What our plane costs in front of vLLM is measured with the same arguments on both sides."""

from __future__ import annotations

import shlex
from itertools import pairwise

from rich.console import Console

from bench.plane import ALONE, BEHIND, peers, show


def words(command: str) -> list[str]:
    return [word.format(model="/m", port=1) for word in shlex.split(command)]


def test_both_servers_get_the_same_arguments() -> None:
    given = {"enforce_eager": True, "enable_prefix_caching": False, "hf_overrides": {"a": {"b": 1}}, "block_size": 32}
    both = peers("/v/python", given, 2, "bfloat16", 1024)
    alone, behind = words(both[ALONE].command), words(both[BEHIND].command)
    assert alone[:3] == ["/v/python", "-m", "vllm.entrypoints.openai.api_server"]
    assert "--enforce-eager" in alone
    assert "--no-enable-prefix-caching" in alone
    named = dict(pairwise(alone))
    assert (named["--model"], named["--port"], named["--hf-overrides"]) == ("/m", "1", '{"a": {"b": 1}}')
    assert (named["--tensor-parallel-size"], named["--dtype"], named["--max-model-len"]) == ("2", "bfloat16", "1024")
    # What our worker gives vLLM by itself is given to the other one, too.
    assert (named["--max-num-seqs"], named["--scheduling-policy"]) == ("64", "priority")
    assert behind[-4:] == ["--model", "/m", "--port", "1"]
    assert [word for at, word in enumerate(behind) if behind[at - 1] == "--engine-arg"] == [
        "enforce_eager=true",
        "enable_prefix_caching=false",
        'hf_overrides={"a": {"b": 1}}',
        "block_size=32",
    ]


def test_the_table_has_ratio_difference_and_failed_runs() -> None:
    def run(rate: float, ttft: float) -> dict[str, float]:
        return {"output_tokens_per_s": rate, "ttft_ms_p50": ttft}

    both = {ALONE: [run(100, 20), run(200, 30), run(110, 40)], BEHIND: [run(99, 33)]}
    shown = Console(record=True, width=200)
    show({"scenarios": {"16 clients": both, "64 clients": {ALONE: []}}, "failed": {BEHIND: ["round 2: no"]}}, shown)
    text = shown.export_text()
    assert all(word in text for word in ("16 clients", "0.900", "30.0", "33.0", "3.0", "round 2: no"))
    assert "64 clients" not in text
