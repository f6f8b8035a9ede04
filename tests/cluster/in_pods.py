"""Programs that run in pods of the cluster: callers of services, and a listener.

Each is the text of a Python program. Its argument is JSON, and so is what it prints, unless its comment says otherwise.
"""

from __future__ import annotations

# Calls methods, each over a connection of its own. Argument: {"domain", "folder", "shown", "servers", "methods"}, with
# addresses by component, and pairs of component and method; `folder` holds ca.crt and a certificate, which is `shown`
# or not. Prints statuses.
CALL = """
import asyncio, json, sys
from pathlib import Path
import grpc.aio
it = json.loads(sys.argv[1])
files = [Path(it["folder"], name).read_bytes() for name in ("ca.crt", "tls.key", "tls.crt")]
credentials = grpc.ssl_channel_credentials(*files[: 3 if it["shown"] else 1])
async def call(component, method):
    name = [("grpc.ssl_target_name_override", f"{component}.{it['domain']}")]
    async with grpc.aio.secure_channel(it["servers"][component], credentials, options=name) as channel:
        try:
            await anext(aiter(channel.unary_stream(f"/{method}")(b"", timeout=60)), None)
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return "OK"
async def main():
    print(json.dumps([await call(*each) for each in it["methods"]]))
asyncio.run(main())
"""

# Requests to the gateway of its own pod, which no wire carries. Argument: a list of paths and bodies.
ASK = """
import json, sys, urllib.request
for path, body in json.loads(sys.argv[1]):
    json_type = {"Content-Type": "application/json"}
    request = urllib.request.Request("http://127.0.0.1:8000" + path, json.dumps(body).encode(), json_type)
    urllib.request.urlopen(request, timeout=60).read()
"""

# Hears every packet of its node until one holds `end`. Argument: names and what to listen for, in hexadecimal digits.
# Prints "listening", then the names of what it has heard.
LISTEN = """
import json, socket, sys
wanted = {name: bytes.fromhex(digits) for name, digits in json.loads(sys.argv[1]).items()}
wire, heard = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)), set()
print("listening", flush=True)
while "end" not in heard:
    packet = wire.recv(1 << 17)
    heard.update(name for name, some in wanted.items() if some in packet)
print(json.dumps(sorted(heard)))
"""

# The card that a worker shows to gateways, in one of whose pods this runs. Argument: the worker's address, as
# it is. Prints what the card says of the engine.
CARD = """
import asyncio, json, sys
from ryzanstein.v1 import worker_pb2, worker_pb2_grpc
from services.common.rpc import open_channel
from services.common.settings import ServiceSettings
async def main():
    async with open_channel(sys.argv[1], to="worker", tls=ServiceSettings().open_tls()) as channel:
        card = await worker_pb2_grpc.WorkerStub(channel).GetModelCard(worker_pb2.GetModelCardRequest(), timeout=30)
    print(json.dumps({name: getattr(card, name) for name in ("model", "engine", "resume", "pulls")}))
asyncio.run(main())
"""

# Prints the metrics of its own pod's service, as text. No argument.
METRICS = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:9100/metrics').read().decode())"
