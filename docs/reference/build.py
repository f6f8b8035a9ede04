"""Write the reference pages that are made from the code: `python -m docs.reference.build` (or `make reference`).

configuration.md from the settings classes, families.md from the list of `ryzanstein models`, policies.md from the
parts of the router's policies, quantization.md from the worker's methods, metrics.md from the services' registries,
openapi.json from the gateway, fields.md from its schema, parsers.md from its formats of calls, clients.md from a table
and the pins of the tests with clients.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args, get_origin

import httpx
import msgspec
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from docs.reference.metrics_page import metrics
from services.common.settings import ServiceSettings
from services.compute.model.families.recurrent import RECURRENT
from services.compute.model.formats.compressed_tensors import MIXED
from services.compute.model.formats.registry import FORMATS
from services.finetuner.settings import FinetunerSettings
from services.gateway.api.fields import advisory_fields, neutral_values
from services.gateway.batches import routes as batches
from services.gateway.fine_tuning import routes as fine_tuning
from services.gateway.http.handlers import hot_routes
from services.gateway.main import running_gateway
from services.gateway.reasoning.formats import FORMATS as REASONING_FORMATS
from services.gateway.settings import GatewaySettings
from services.gateway.tools.formats import FORMATS as CALL_FORMATS
from services.kv_coordinator.settings import CoordinatorSettings
from services.router.policies.base import Filter, Picker, PolicyPart, Scorer
from services.router.policies.registry import PARTS, Composition, PolicyName, preset
from services.router.settings import RouterSettings
from services.tools.checker.families import ListedFamily, list_models
from services.worker.pool.settings import PoolSettings
from services.worker.settings import WorkerSettings

HERE = Path(__file__).resolve().parent
CLIENTS = HERE.parents[1] / "tests" / "e2e" / "clients"

SERVICES: tuple[tuple[str, type[ServiceSettings]], ...] = (
    ("Gateway", GatewaySettings),
    ("Router", RouterSettings),
    ("KV-cache coordinator", CoordinatorSettings),
    ("Worker", WorkerSettings),
    ("Pod with several models", PoolSettings),
    ("Fine-tuner", FinetunerSettings),
)


def configuration() -> str:
    """Every environment variable of every service, with default and meaning."""
    lines = ["# Configuration", "", "Made by `make reference`. Every service reads environment variables at start."]
    lines += _settings_table("All services", ServiceSettings, frozenset())
    for title, settings in SERVICES:
        base = WorkerSettings if settings is PoolSettings else ServiceSettings
        lines += _settings_table(title, settings, frozenset(base.model_fields))
    return "\n".join(lines) + "\n"


def _settings_table(title: str, settings: type[ServiceSettings], without: frozenset[str]) -> Iterator[str]:
    yield from ("", f"## {title}", "", "| variable | default | meaning |", "|---|---|---|")
    for name, field in settings.model_fields.items():
        if name in without:
            continue
        meaning = field.description or name.replace("_", " ").capitalize()
        if get_origin(field.annotation) is Literal:
            meaning += f" (one of {', '.join(get_args(field.annotation))})"
        yield f"| `RYZANSTEIN_{name.upper()}` | {_default(field)} | {meaning} |"


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "made at start" if field.default_factory else "required"
    value = ",".join(field.default) if isinstance(field.default, tuple) else field.default
    return f"`{value}`" if value != "" else "empty"


def policies() -> str:
    """Every part that a policy may have, with its fields."""
    names = ", ".join(f"`{name}`" for name in get_args(PolicyName))
    lines = [
        "# Policies",
        "",
        "Made by `make reference`. How they work: `services/router/policies/README.md`.",
    ]
    lines += ["", f"`RYZANSTEIN_POLICY` is one of {names}, or a map in JSON:", "", "| key | meaning |", "|---|---|"]
    lines += [f"| `{name}` | {field.description} |" for name, field in Composition.model_fields.items()]
    for kind, base in (("filters", Filter), ("scorers", Scorer), ("pickers", Picker)):
        lines += ["", f"## {kind.capitalize()}", ""]
        if base.model_fields:
            lines += [f"All have {_part_fields(base, PolicyPart)}", ""]
        lines += ["| type | does | its fields |", "|---|---|---|"]
        parts = [(name, part) for name, part in PARTS.items() if issubclass(part, base)]
        lines += [f"| `{name}` | {_first_line(part)} | {_part_fields(part, base)} |" for name, part in parts]
    for name in get_args(PolicyName):
        made = preset(name)
        lines += ["", f"## The preset {name}", "", "```json", "{"]
        lines += [f'  "filters": [{", ".join(_part(part) for part in made.filters)}],']
        lines += [f'  "scorers": [{", ".join(_part(part) for part in made.scorers)}],']
        lines += [f'  "picker": {_part(made.picker)}', "}", "```"]
    return "\n".join(lines) + "\n"


def _part(part: BaseModel) -> str:
    return json.dumps({"type": type(part).model_fields["type"].default, **part.model_dump(exclude_defaults=True)})


def _first_line(part: type[PolicyPart]) -> str:
    return (part.__doc__ or "").strip().partition("\n")[0]


def _part_fields(part: type[PolicyPart], base: type[PolicyPart]) -> str:
    shared = base.model_fields
    fields = [
        f"`{name}` ({_default(field)}): {field.description}"
        for name, field in part.model_fields.items()
        if name != "type" and (name not in shared or shared[name].default != field.default)
    ]
    return "<br>".join(fields) or "none"


def quantization() -> str:
    """Every way of storing quantized weights that a worker reads."""
    lines = [
        "# Quantized checkpoints",
        "",
        "Made by `make reference`. What `quantization_config` of a `config.json` may say. Another `quant_method` or",
        "`format`, and values of other keys that would change the weights, are refused at start, by key.",
        "",
        "On CPUs with our kernels, integers are multiplied",
        "[as they are stored](../adr/021-weights-stay-integers-on-cpus.md), in bfloat16. FP8, float32 (`--dtype`) and",
        "other devices are dequantized when they are loaded: code minus zero point, times scale, in float32, rounded",
        "once to the dtype that is served. The weights then take the memory, and their products the time, of an",
        "unquantized model. Activations and the KV cache are what `--dtype` and `--kv-dtype` say, whatever the",
        "checkpoint recommends. Lists of modules that were left out are not needed: the tensors say it.",
        "",
        "| weights | `quant_method` | `format` |",
        "|---|---|---|",
    ]
    lines += [
        f"| {known.title} | `{known.quant_method}` | {_listed(list(known.variants)) or '–'} |"
        for known in sorted(FORMATS, key=lambda known: (known.quant_method, known.title))
    ]
    lines += ["", f"compressed-tensors' `{MIXED}` mixes groups of layers, at most one of each format."]
    return "\n".join(lines) + "\n"


_COSTS = """## What some of them cost

- DeepSeek 2 and 3: the KV cache holds a token's latent and rotated key once as the key and once as the value,
  2 * (512 + 64) numbers in a layer, for all heads together. Keys and values of DeepSeek 3's 128 heads would be 40,960.
  Every rank holds all of them. Torch computes attention, because the kernels for CPUs know heads of up to 256.
  The matrices of the heads' keys and values are kept in the served dtype, whatever they are stored in.
- gpt-oss: torch computes attention on CPUs, because the kernels know no sinks. Where our kernels multiply, experts in
  MXFP4 are kept as integers of 8 bits with a scale for each 32, exactly; elsewhere in the served dtype.
- Llama 4: keys and values before a chunk stay in the cache, although layers with chunks no longer read them. The
  tokens of a block have to divide the chunk. A step is not replayed once a sequence is longer than a chunk.
- BitNet: on several ranks each of the norms before o and down needs one more all-reduce.
"""


def families() -> str:
    """Every family of models that a worker serves."""
    lines = [
        "# Families of models",
        "",
        "Made by `make reference`. `architectures` of a `config.json` names the family; without it `model_type` does.",
        "A checkpoint of the body alone (`Qwen3Model`) embeds and does not generate. One with a head for labels",
        "(`Qwen3ForSequenceClassification`) classifies and scores.",
        "",
        "Each family is tested with random checkpoints that have the published names: logits in float32 equal those",
        "of `transformers` within 1e-4, for whole prompts, in chunks, token by token and continued at every index, on",
        "1, 2 and 4 ranks. The last column names these checkpoints as the tests do, and counts the published",
        "`config.json` that tests read; tests serve the weights of a few models. `ryzanstein models --json` says the",
        "same.",
        "",
        "The number of ranks divides the attention heads, and the KV heads unless it is a multiple of their number.",
        "It divides the MLP's columns; in a mixture the experts and the columns of a shared one. Every family is read",
        "from safetensors, [quantized](quantization.md) or not; some also from GGUF.",
        "",
        "| architecture | `model_type` | what it is | features | tested checkpoints |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| `{known.architecture}` | `{known.model_type}` | {known.about} | {', '.join(known.features) or '–'} | "
        f"{_tested(known)} |"
        for known in list_models().families
    ]
    lines += ["", _COSTS, "## Refused", "", "The worker refuses these by name, and says what to serve instead:", ""]
    lines += [f"- `{name}`: {reason}." for name, reason in RECURRENT.items()]
    return "\n".join(lines) + "\n"


def _tested(family: ListedFamily) -> str:
    parts = [f"random: {_listed(list(family.random))}"]
    if family.published:
        parts.append(f"{len(family.published)} published `config.json`")
    if "GGUF" in family.formats:
        parts.append("GGUF")
    return "; ".join([*parts, *(f"weights of {name}" for name in family.served)])


def _bodies() -> Iterator[tuple[str, type[msgspec.Struct]]]:
    """Each body and the structs inside it, with their titles."""
    unused: Any = None  # handlers are made, and not called
    stores: Any = SimpleNamespace(queue=unused, conversations=unused, turns=unused)
    routes = hot_routes(GatewaySettings(), *[unused] * 3, stores, *[unused] * 3)
    documented = {route.path: route.documented for route in routes}
    documented |= {batches.PATH: batches.DOCUMENTED, fine_tuning.PATH: fine_tuning.DOCUMENTED}
    for path, entry in documented.items():
        yield f"POST {path}", entry.body
        yield from entry.parts.items()


def fields() -> str:
    """The treatment of every field of every body."""
    lines = [
        "# Fields of request bodies",
        "",
        "Made by `make reference`. `null` is the default of every field that may be left out, in every body. A field",
        "that is not in these tables is [left out and named](../serving.md#what-is-left-out). The WebSocket takes the",
        "same bodies.",
    ]
    for title, kind in _bodies():
        lines += ["", f"## {title}", "", "| | |", "|---|---|"]
        advisory, refused = advisory_fields(kind), neutral_values(kind)
        names = [name for name in kind.__struct_encode_fields__ if name not in advisory and name not in refused]
        lines.append(f"| honoured | {_listed(names)} |")
        if advisory:
            lines.append(f"| accepted, without effect | {_listed(sorted(advisory))} |")
        if refused:
            lines.append(f"| refused | {', '.join(f'`{name}`{_but(refused[name])}' for name in sorted(refused))} |")
    return "\n".join(lines) + "\n"


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _but(values: tuple[object, ...]) -> str:
    accepted = [f"`{json.dumps(value)}`" for value in values if value is not None]
    return f" (but not {' or '.join(accepted)})" if accepted else ""


def openapi() -> str:
    """The document of a gateway that was started for it."""

    async def fetch() -> object:
        settings = GatewaySettings(gateway_port=0, router_addresses=("127.0.0.1:1",))
        async with running_gateway(settings) as gateway, httpx.AsyncClient(trust_env=False) as client:
            return (await client.get(f"http://{settings.host}:{gateway.http.port}/openapi.json")).json()

    return json.dumps(asyncio.run(fetch()), indent=1, sort_keys=True) + "\n"


def parsers() -> str:
    """How models write calls and reasoning, as the gateway reads them."""
    lines = [
        "# Parsers of calls and reasoning",
        "",
        "Made by `make reference`. The chat template chooses; `RYZANSTEIN_TOOL_PARSER` takes a name or another",
        "name. Tests read each row's examples, whole and cut at every position",
        "(`tests/unit/gateway/test_tool_parsers.py`, `tests/unit/gateway/test_reasoning.py`), and texts in the exact",
        "form of a published sample of the model's output (`tests/unit/gateway/published_outputs.py`).",
        "",
        "| parser | other names | models | a call | template has | form read from |",
        "|---|---|---|---|---|---|",
    ]
    sources = tomllib.loads((HERE / "parsers.toml").read_text())
    for name, named in CALL_FORMATS.items():
        aliases = ", ".join(f"`{alias}`" for alias in named.aliases)
        signs = " or ".join(map(_code, named.signs)) or ("no other sign" if name == "generic" else "only by setting")
        source = sources["calls"].get(name, "")
        lines.append(f"| `{name}` | {aliases} | {named.models} | {_code(named.example)} | {signs} | {source} |")
    lines += ["", "| reasoning of | begins | ends | template has | form read from |", "|---|---|---|---|---|"]
    for form in REASONING_FORMATS:
        signs = " and ".join(map(_code, form.signs))
        source = sources["reasoning"][form.models]
        lines.append(f"| {form.models} | {_code(form.begins[0])} | {_code(form.end)} | {signs} | {source} |")
    return "\n".join(lines) + "\n"


def _code(text: str) -> str:
    """A text in a cell of a table."""
    escaped = text.replace("|", "\\|").replace("\n", "\\n")
    return f"`` {escaped} ``" if "`" in text else f"`{escaped}`"


def clients() -> str:
    """The clients that were tried, with their versions."""
    lines = [
        "# Clients",
        "",
        "Made by `make reference` from `docs/reference/clients.toml`. The nightly workflow installs and runs each of",
        "them (`tests/e2e/test_clients.py`), if its row says nothing else: a script through a library, a program",
        "without a terminal. The requests of four coding agents are also a test of their own",
        "(`tests/integration/gateway/test_clients.py`).",
        "",
        "| client | version | API | what works |",
        "|---|---|---|---|",
    ]
    for client in tomllib.loads((HERE / "clients.toml").read_text())["client"]:
        version = client.get("version") or _pins(CLIENTS / client["folder"])
        lines.append(f"| {client['name']} | {version} | `{client['api']}` | {client['works']} |")
    return "\n".join(lines) + "\n"


def _pins(folder: Path) -> str:
    package = folder / "package.json"
    if package.exists():
        pins = [" ".join(pin) for pin in json.loads(package.read_text())["dependencies"].items()]
    else:
        pins = (folder / "requirements.txt").read_text().replace("==", " ").split("\n")
    return ", ".join(filter(None, pins))


PAGES = {
    "configuration.md": configuration,
    "policies.md": policies,
    "quantization.md": quantization,
    "families.md": families,
    "metrics.md": metrics,
    "fields.md": fields,
    "clients.md": clients,
    "parsers.md": parsers,
    "openapi.json": openapi,
}


def main() -> int:
    """Write every page; with `--check`, only say which ones are not current."""
    stale = [name for name, make in PAGES.items() if not _is_current(HERE / name, make())]
    if "--check" in sys.argv:
        return bool(stale)
    for name in stale:
        (HERE / name).write_text(PAGES[name]())
    return 0


def _is_current(page: Path, text: str) -> bool:
    return page.exists() and page.read_text() == text


if __name__ == "__main__":
    sys.exit(main())
