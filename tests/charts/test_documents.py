"""Values in the documents: each that they name exists, and each that they show renders."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.charts.rendering import Rendered, environment, expected_models, render, run_helm
from tests.programs import CHART

ROOT = CHART.parents[1]
PAGES = sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("docs/runbooks/*.md"), CHART / "UPGRADING.md", ROOT / "README.md"])
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
TOP = set(yaml.safe_load((CHART / "values.yaml").read_text()))
BLOCK = re.compile(r"^ *```(?P<language>\w*)\n(?P<text>.*?)^ *```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
NAME = re.compile(r"([A-Za-z]+(?:\.[A-Za-z]+)+)(?:[:=] ?\S+)?")
SELECTED = re.compile(r"app\.kubernetes\.io/component in \(([a-z,]+)\)")
FILE = re.compile(r"\.(?:yaml|json|txt|tgz)$")


def spans(page: Path) -> list[str]:
    """The texts that are set as code."""
    return SPAN.findall(BLOCK.sub("", page.read_text()))


def named() -> set[tuple[str, str]]:
    """Values by page and path, such as `redis.auth.generation`."""
    actual = [(page.name, NAME.fullmatch(span)) for page in PAGES for span in spans(page)]
    return {
        (page, name[1]) for page, name in actual if name and name[1].split(".")[0] in TOP and not FILE.search(name[1])
    }


def shown() -> list[Any]:
    """Mappings of values: within the text, or as blocks."""
    actual = []
    for page in PAGES:
        blocks = [block["text"] for block in BLOCK.finditer(page.read_text()) if block["language"] == "yaml"]
        for text in [*spans(page), *blocks]:
            key = re.match(r"(\w+):(?: \{|\n)", text)
            if key and key[1] in TOP:
                actual.append(pytest.param(yaml.safe_load(text), id=f"{page.name}: {key[1]}"))
    return actual


def inside(schemas: list[dict[str, Any]], key: str) -> Iterator[dict[str, Any]]:
    """The schemas of a key of objects that have one of these schemas."""
    while schemas:
        schema = schemas.pop()
        if "$ref" in schema:
            target: Any = SCHEMA
            for part in schema["$ref"].removeprefix("#/").split("/"):
                target = target[part]
            schemas.append(target)
        for several in ("anyOf", "oneOf", "allOf"):
            schemas += schema.get(several, [])
        further = schema.get("additionalProperties")
        if key in schema.get("properties", {}):
            yield schema["properties"][key]
        elif isinstance(further, dict):
            yield further
        yield from schema.get("patternProperties", {}).values()


def test_values_that_are_named_exist() -> None:
    assert len(named()) > 30
    unknown = []
    for page, name in sorted(named()):
        schemas = [SCHEMA]
        for key in name.split("."):
            schemas = list(inside(schemas, key))
        if not schemas:
            unknown.append(f"{page} names {name}")
    assert not unknown


@pytest.mark.parametrize("values", shown())
def test_values_that_are_shown_render(values: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    assert render(file)


@pytest.mark.parametrize(
    ("values", "models", "chats", "scheme"),
    [
        ("", "smollm2-135m-instruct", "smollm2-135m-instruct", "http"),
        ('workers: {pools: {default: {servedName: "it\'s"}, a: {servedName: embeds}}}', "embeds, it's", "it's", "http"),
        ("workers: {pools: {default: null, b: {servedName: two}, a: {servedName: one}}}", "one, two", "one", "http"),
        ("gateway: {tls: {secretName: public}, service: {port: 443}, tenancy: {enabled: true}}", "", "", "https"),
    ],
)
def test_notes_name_all_models_and_print_a_curl_line_for_a_chat_model(
    values: str, models: str, chats: str, scheme: str, tmp_path: Path
) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(values)
    notes = run_helm("install", "notes", str(CHART), "--dry-run=client", "--values", str(file), major=4)
    assert f" serves {models or 'smollm2-135m-instruct'}.\n" in notes
    words = shlex.split(notes[notes.index("  curl ") :].partition("\n\n")[0])
    assert f"{scheme}://127.0.0.1:8000/v1/chat/completions" in words
    assert ("--insecure" in words) == (scheme == "https"), "the certificate names another host"
    assert ("Authorization: Bearer $API_KEY" in words) == ("tenancy" in values)
    body = json.loads(words[words.index("-d") + 1])
    assert body == {
        "model": chats or "smollm2-135m-instruct",
        "messages": [{"role": "user", "content": "What is a list?"}],
    }


def test_pods_that_documents_wait_for_have_images_of_ours(rendered: Rendered) -> None:
    """Or else an image of Grafana that cannot be pulled would be taken for an installation that does not serve."""
    (selector,) = {match for page in PAGES for match in SELECTED.findall(page.read_text())}
    waited = [pod for pod in rendered.pods if pod.component in selector.split(",")]
    serving = [pod for pod in rendered.pods if str(pod).startswith("StatefulSet") or pod.component == "gateway"]
    assert {str(pod) for pod in serving if pod.component != "redis"} <= {str(pod) for pod in waited}
    for pod in waited:
        for container in pod.containers:
            assert "ryzanstein" in container["image"], f"{pod}: {container['image']}"


def test_the_notes_show_the_memory_left_for_a_model() -> None:
    """As the worker computes it; of the bundled model it is known to fit."""
    install = ("install", "notes", str(CHART), "--dry-run=client")  # without a cluster only Helm 4 writes notes
    set_ = ("--set", "workers.pools.default.model=hf://org/name", "--set", "workers.pools.default.tensorParallel=2")
    message = run_helm(*install, *set_, "--set", "workers.pools.default.resources.limits.memory=4Gi", major=4)
    taken = 150 + 2 * 416 + 176
    assert f"limit of 4Gi leaves {4096 - taken} MiB for weights and KV cache" in message
    assert f"the workspace of a step take {taken} MiB" in message
    assert "for weights and KV cache" not in run_helm(*install, major=4)


def test_the_pool_shown_in_values_yaml_stands_beside_the_default_pool() -> None:
    """Its lines without their comment signs are the profile for retrieval."""
    text = (CHART / "values.yaml").read_text()
    lines = text[text.index("    # embedder:") :].partition("\n\n")[0].splitlines()
    shown = yaml.safe_load("\n".join(line.replace("# ", "", 1) for line in lines))
    profile = yaml.safe_load((CHART / "profiles" / "rag.yaml").read_text())
    assert profile["workers"]["pools"] == {"default": {}} | shown
    rendered = render(inline=yaml.safe_dump({"workers": {"pools": shown}}))
    (embedder,) = (pod for pod in rendered.pods_of("worker") if "embedder" in str(pod))
    assert environment(embedder.containers[0])["RYZANSTEIN_SERVED_MODEL_NAME"] == "minilm"
    assert len(rendered.pods_of("worker")) == 2
    assert "minilm" in expected_models(rendered)
    assert not [pod for pod in render().pods_of("worker") if "embedder" in str(pod)]
