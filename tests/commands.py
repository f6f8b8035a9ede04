"""The commands of the pages that operators follow: where a test types each, or why none does."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tests.programs import CHART

ROOT = CHART.parents[1]
# For clients and contributors; what they show has tests of its own.
OTHERS = (
    *(
        "adapters",
        "api-keys",
        "architecture",
        "benchmarks",
        "default-model",
        "dependencies",
        "evaluation",
        "fine-tuning",
        "images",
    ),
    *("performance", "quantizing", "releasing", "serving", "structured-output", "tools"),
)
PAGES = sorted(
    page
    for page in (
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("docs/runbooks/*.md"),
        *ROOT.glob("deploy/**/*.md"),
        *CHART.glob("*.md"),
    )
    if page.stem not in OTHERS
)
BLOCK = re.compile(r"^ *```(?P<language>\w*)\n(?P<text>.*?)^ *```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"``(.+?)``|`([^`]+)`", re.DOTALL)
# A span is a command when it begins with one of these and goes on.
PROGRAMS = (
    *("kubectl", "helm", "ryzanstein", "python", "make", "pip", "docker", "terraform", "nvidia-smi", "py-spy"),
    *(
        "curl",
        "redis-cli",
        "grpcurl",
        "openssl",
        "nc",
        "ss",
        "ip",
        "ls",
        "grep",
        "env",
        "printf",
        "kill",
        "cp",
        "rsync",
    ),
    *("dmesg", "ps", "free", "vmstat", "mpstat"),
)
COMMAND = re.compile(rf"(?:{'|'.join(PROGRAMS)}) \S|nvidia-smi$", re.DOTALL)
ON_A_CLUSTER = re.compile(r"\b(?:kubectl|helm|ryzanstein kube|ryzanstein trace)\b")
PLACEHOLDER = re.compile(r"(?<![\w${])(?<! -)(?!RYZANSTEIN_|HF_|EXISTS|GET)[A-Z][A-Z_]*(?![\w=])")

# Why a command is typed by no test. A block is named by its first line.
NOT_TYPED = {
    command: reason
    for reason, group in {
        "a name in the text, not a whole command": (
            *("helm install", "helm upgrade", "helm upgrade --install --atomic", "helm test", "kubectl scale"),
            *(
                "ryzanstein keys",
                "ryzanstein routes",
                "ryzanstein routes set",
                "ryzanstein plan",
                "ryzanstein plan --schedule",
            ),
            *("kubectl edit", "kubectl port-forward", "kubectl logs", "docker compose logs", "pip install", "curl -v"),
            *(
                "cp -rL",
                "rsync -L",
                "ryzanstein up",
                "ryzanstein simulate",
                "ryzanstein fetch",
                "ryzanstein fetch --endpoint",
            ),
            *(
                "ryzanstein bench compare",
                "kubectl get hpa",
                "ryzanstein up --workers 3 --tensor-parallel 1",
                "python -m bench.soak",
            ),
        ),
        "tests/e2e/test_by_hand.py starts the services so": (
            *("python -m services.kv_coordinator", "python -m services.router"),
            *("python -m services.worker", "python -m services.gateway"),
        ),
        "tests/e2e/test_simulate.py types it at a free port, with fewer workers": (
            "ryzanstein simulate --workers 100",
            "python -m bench.engine models/ryzanstein-tiny --batches 1,2,4 --rounds 1 --curve curve.json",
        ),
        "tests/integration/gateway/test_request_log.py and tests/unit/planner run it": (
            "ryzanstein plan --target first_token_p95=1s --target pace_p95=50ms",
            "ryzanstein plan --target first_token_p95=1s --tier none --tier 200000@50000",
            "ryzanstein plan --target first_token_p95=1s --serve 127.0.0.1:8090",
            "python -m bench.engine models/ryzanstein-tiny --batches 1,2,4 --rounds 1 --curve int8.json",
        ),
        "tests/e2e/test_documents.py has started its installation so": (
            "(umask 077; openssl rand -hex 32 > admin-token)",
        ),
        "it needs a load that outlives workers": ("python -m bench.fallback",),
        "tests/integration/worker_server/test_pool.py starts it as the chart does": ("python -m services.worker.pool",),
        "tests/unit/bench/test_commands.py runs it with few requests": (
            "python -m bench.fidelity",
            "python -m bench.policies",
        ),
        "tests/e2e/test_documents.py runs it with four workers": (
            "python -m bench.router --holders 1000 --seconds 2 --rate 0 --rounds 1",
        ),
        "tests/unit/bench/test_fleet.py runs it with fewer workers": (
            "python -m bench.fleet --workers 100 --routers 1 --gateways 1 --rate 50 --seconds 20 --workload prefix",
            "python -m bench.fleet --sweep 10,100,300 --rate 20 --seconds 20 --workload prefix --out docs/scale.md",
            "python -m bench.fleet --workers 100 --rate 10 --knee",
        ),
        "it installs what the tests run from": (
            *("pip install -c constraints.txt '.[serve]'", "pip install '.[cli,kube]'"),
            *("make kernels", "make wheelhouse"),
        ),
        "it takes minutes, and make or the gate run it": (
            *(
                "make bench",
                "make test",
                "make test-vllm",
                "make test-triton",
                "make soak",
                "make soak MINUTES=30 FAULT_EVERY=20s SEED=0",
                "make test-cluster",
                "make test-fleet",
                'make test-fleet ARGS="--workers 1000 --streams 20000 --rate 40"',
            ),
            "python -m bench.soak --minutes 30 --fault-every 20s --seed 0",
            "python -m bench.collectives",
            "python -m bench.serve --url http://127.0.0.1:8000 --concurrency 16 --prompt-tokens 512 "
            "--output-tokens 128",
        ),
        "it needs the hub; tests/integration/cli/test_fetch.py has one of its own": (
            *("ryzanstein fetch hf://ORG/NAME --to /mnt/models", "ryzanstein fetch hf://Qwen/Qwen3-0.6B --to /models"),
            'curl -H "Authorization: Bearer $HF_TOKEN" https://huggingface.co/api/models/OWNER/NAME',
            "ls ~/.cache/huggingface/hub",
        ),
        "it needs a registry; tests/unit/deploy/test_mirror.py has a copying program": (
            "deploy/images/mirror.sh registry.example.com/team",
        ),
        "it needs a cloud; tests/charts/test_deploy.py renders what the module and the examples give": (
            "cd deploy/terraform/examples/cluster",
        ),
        "it needs keys; tests/integration/gateway/test_tenants.py reads the header": (
            "curl -si localhost:8000/v1/models | grep -i www-authenticate",
        ),
        "it needs an administrator's token; tests/integration/gateway/test_issued_keys.py has one": (
            *("ryzanstein keys rotate", "ryzanstein keys list", "ryzanstein keys limit ID --hours HH:MM-HH:MM"),
            "ryzanstein keys create acme --budget-per-month 250",
        ),
        "tests/e2e/test_several_models.py types it with copies of the bundled model": (
            "ryzanstein up --model /models/a --model /models/b:int8 --model c.gguf",
            "ryzanstein up --model /models/a --model /models/b:int8 --model c.gguf --max-awake 1 --idle-sleep 5m",
        ),
        "it needs an issuer; tests/integration/gateway/test_jwt_tokens.py has one": (
            "curl -s https://ISSUER/.well-known/openid-configuration",
        ),
        "it needs a Redis with TLS; tests/integration/common/test_redis_access.py has one": (
            "openssl s_client -connect HOST:PORT -CAfile CA.pem -verify_return_error",
        ),
        "vLLM takes 5 GB; tests/vllm starts an installation with it": (
            "python -m venv vllm && vllm/bin/pip install -e '.[vllm]'",
        ),
        "it needs a GPU": ("nvidia-smi", "dmesg | grep -i xid"),
        "it asks the machine's kernel, which containers may not": ("dmesg | grep -i -e oom -e killed",),
        "no node has the image": ("kubectl port-forward service/ryzanstein-grafana 3000",),
        "it needs docker; tests/charts/test_compose.py reads the file": (
            "docker compose -f deploy/compose.yaml --profile monitoring up",
        ),
        "it needs docker; tests/images/test_images.py starts the image": (
            "docker run --rm -p 8000:8000 ghcr.io/ryzanstein/ryzanstein:simulator-0.1.0",
        ),
        "it needs a history of minutes; the pictures are made by hand": (
            "python -m charts.tools.pictures http://127.0.0.1:9090 --minutes 20",
        ),
        "it needs a program that is not part of a development machine": (
            *("mpstat -P ALL 1", "py-spy dump --pid PID", "nc -vz HOST PORT"),
            'grpcurl -plaintext -d \'{"worker_id": "worker-0", "grace_ms": 5000}\' ROUTER:50052 '
            "ryzanstein.v1.Router/DrainWorker",
        ),
    }.items()
    for command in group
}


class CommandPlace(StrEnum):
    """Where a command is typed."""

    CLUSTER = "cluster"
    MACHINE = "machine"


# Values that the tests fill in.
PLACEHOLDERS = {
    CommandPlace.CLUSTER: ("NAMESPACE", "RELEASE", "POOL", "POD", "NODE", "REQUEST_ID", "N"),
    CommandPlace.MACHINE: (
        "HOST",
        "PORT",
        "PID",
        "PATH",
        "NAMESPACE",
        "DIGEST",
        "TENANT",
        "YYYYMM",
        "USER",
        "PASSWORD",
    ),
}


@dataclass(frozen=True)
class Command:
    """A block of shell commands, or a command within the text."""

    page: Path
    text: str

    def __str__(self) -> str:
        return f"{self.page.stem}: {self.text}"

    @property
    def name(self) -> str:
        """Its first line, without what goes on."""
        return re.split(r"\s+#|\n", self.text.strip())[0]

    @property
    def place(self) -> CommandPlace | None:
        """Where it is typed; None: nowhere, for the reason in NOT_TYPED."""
        if self.name in NOT_TYPED:
            return None
        return CommandPlace.CLUSTER if ON_A_CLUSTER.search(self.text) else CommandPlace.MACHINE

    def filled(self, values: dict[str, str]) -> str:
        """With values for placeholders."""
        return PLACEHOLDER.sub(lambda match: values.get(match[0], match[0]), self.text)


def commands(page: Path, place: CommandPlace | None = None) -> list[Command]:
    """Those of a page, in its order; of one place, or all."""
    text = page.read_text()
    snippets = [(block.start(), block["text"]) for block in BLOCK.finditer(text) if block["language"] == "sh"]
    without = BLOCK.sub(lambda block: "\n" * len(block[0]), text)  # places stay
    spans = [(span.start(), span[1] or span[2]) for span in SPAN.finditer(without)]
    snippets += [(start, " ".join(span.split())) for start, span in spans if COMMAND.match(span)]
    every = [Command(page, text) for _, text in sorted(snippets)]
    return [each for each in every if place is None or each.place is place]


def expressions(page: Path) -> list[str]:
    """PromQL: blocks of it, and what within the text is more than a metric's name."""
    text = page.read_text()
    blocks = [
        line for block in BLOCK.finditer(text) if block["language"] == "promql" for line in block["text"].splitlines()
    ]
    spans = [" ".join((span[1] or span[2]).split()) for span in SPAN.finditer(BLOCK.sub("", text))]
    typed = [
        span for span in spans if re.search(r"ryzanstein_\w+|process_\w+|__name__", span) and re.search(r"[({]", span)
    ]
    return [each.strip() for each in (*blocks, *typed) if each.strip()]
