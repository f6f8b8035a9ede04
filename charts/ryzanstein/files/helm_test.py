"""`helm test`: a client in the cluster asks each model for what it does, and reads metrics."""

import json
import os
import time
import uuid

import httpx

MODELS = os.environ["MODELS"].splitlines()
HEADERS = {"Authorization": f"Bearer {key}"} if (key := os.environ.get("API_KEY")) else {}
PATIENCE_S = 60
TEXT = "Explain what a list is. " * 8  # longer than a KV block, so that a second turn finds some of it cached


def new_pod() -> httpx.HTTPTransport:
    """Connects again for some seconds: network policies let a pod through only a moment after it has started.

    The gateway's own certificate, if it has one, is for its public name, not for the Service's.
    """
    return httpx.HTTPTransport(retries=6, verify=False)


def post(client: httpx.Client, path: str, body: dict[str, object]) -> httpx.Response:
    """Wait while no worker serves the model yet: 503."""
    deadline = time.monotonic() + PATIENCE_S
    while (answer := client.post(path, json=body)).status_code == 503 and time.monotonic() < deadline:
        time.sleep(1)
    return answer


def chat(client: httpx.Client, model: str, **more: object) -> httpx.Response:
    """A chat with the text."""
    body = {"model": model, "messages": [{"role": "user", "content": TEXT}], "max_tokens": 8, **more}
    return post(client, "/v1/chat/completions", body)


def check(client: httpx.Client, model: str) -> None:
    """Chat, stream, and a session's second turn with cached tokens; or what a model does that generates no text."""
    session = f"helm-test-{uuid.uuid4()}"
    answers = [chat(client, model, user=session) for _ in range(2)]
    if answers[0].status_code == 400 and answers[0].json()["error"]["code"] == "unsupported_model":
        check_input(client, model)
        return
    usages = [answer.raise_for_status().json()["usage"] for answer in answers]
    assert usages[0]["completion_tokens"] > 0, usages
    assert usages[1]["prompt_tokens_details"]["cached_tokens"] > 0, (
        f"{model}: the second turn had no cached tokens: {usages}"
    )
    stream = chat(client, model, stream=True).raise_for_status()
    lines = [line for line in stream.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]", f"{model}: the stream has no end: {lines[-1]}"
    assert len([json.loads(line[6:]) for line in lines[:-1]]) > 1, f"{model}: the stream came in one piece"
    print(f"{model}: chat, stream and session are well")


def check_input(client: httpx.Client, model: str) -> None:
    """Embeddings, or classes."""
    body: dict[str, object] = {"model": model, "input": TEXT}
    answers = [post(client, path, body) for path in ("/v1/embeddings", "/v1/classify")]
    assert any(answer.is_success for answer in answers), f"{model}: {[answer.text for answer in answers]}"
    print(f"{model}: embeddings or classes are well")


def check_targets(url: str) -> None:
    """The bundled Prometheus finds and reaches every pod that serves; it looks for them every few seconds."""
    wanted = set(os.environ["COMPONENTS"].split(","))
    deadline = time.monotonic() + PATIENCE_S
    with httpx.Client(base_url=url, timeout=10, transport=new_pod()) as prometheus:
        while True:
            answer = prometheus.get("/api/v1/targets", params={"state": "active"}).raise_for_status()
            targets = answer.json()["data"]["activeTargets"]
            missing = wanted - {target["labels"]["component"] for target in targets}
            down = [f"{each['labels']['pod']}: {each['lastError']}" for each in targets if each["health"] != "up"]
            if not missing and not down:
                print(f"Prometheus reads {len(targets)} pods")
                return
            assert time.monotonic() < deadline, f"Prometheus has no pod of {sorted(missing)} and cannot read {down}"
            time.sleep(2)


with httpx.Client(
    base_url=os.environ["BASE_URL"], headers=HEADERS, timeout=PATIENCE_S + 30, transport=new_pod()
) as client:
    for model in MODELS:
        check(client, model)
    metrics = client.get("/metrics")
    metrics.raise_for_status()
    assert "ryzanstein_gateway_in_flight_requests" in metrics.text, "no metrics of the gateway"
    print("metrics are well")
if prometheus_url := os.environ.get("PROMETHEUS_URL"):
    check_targets(prometheus_url)
