"""open-webui: its server lists the model, and passes an answer on, whole and streamed."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

url, name = sys.argv[1:]
ASK = {"model": name, "messages": [{"role": "user", "content": "SAY 21%20in%20the%20shade"}]}
SETTINGS = {
    "OPENAI_API_BASE_URL": f"{url}/v1",
    "OPENAI_API_KEY": "unused",
    "WEBUI_AUTH": "False",
    "WEBUI_SECRET_KEY": "unused",
    "ENABLE_OLLAMA_API": "False",
    "OFFLINE_MODE": "True",
    "HF_HUB_OFFLINE": "1",
    "RAG_EMBEDDING_ENGINE": "openai",
    "RAG_OPENAI_API_BASE_URL": f"{url}/v1",
}


def wait_ready(client: httpx.Client, server: subprocess.Popen[bytes]) -> None:
    while server.poll() is None:
        try:
            if client.get("/health").is_success:
                return
        except httpx.HTTPError:
            time.sleep(0.5)
    raise AssertionError("the server has ended")


def talk(client: httpx.Client) -> None:
    token = client.post("/api/v1/auths/signin", json={"email": "", "password": ""}).raise_for_status().json()["token"]
    client.headers["authorization"] = f"Bearer {token}"
    assert name in [model["id"] for model in client.get("/api/models").raise_for_status().json()["data"]]
    whole = client.post("/api/chat/completions", json=ASK | {"stream": False}).raise_for_status().json()
    assert whole["choices"][0]["message"]["content"] == "21 in the shade", whole
    streamed = client.post("/api/chat/completions", json=ASK | {"stream": True}).raise_for_status().text
    assert "data: [DONE]" in streamed, streamed


with TemporaryDirectory() as data:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    command = [Path(sys.executable).parent / "open-webui", "serve", "--host", "127.0.0.1", "--port", port]
    with subprocess.Popen(command, env=os.environ | SETTINGS | {"DATA_DIR": data}) as server:
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client:
                wait_ready(client, server)
                talk(client)
        finally:
            server.kill()
