"""The other ends of a worker's streams, in a process of their own: a gateway's, a router's and a coordinator's.

    python -m bench.worker_peers 50051

Each line of the input is a JSON object of `prompts`, which are submitted at once, and of `output_tokens`. The answer is
a line when the worker has ended all of them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections.abc import AsyncIterable

from ryzanstein.v1 import worker_pb2 as pb
from ryzanstein.v1 import worker_pb2_grpc

from services.common.rpc import open_channel

DONE = "done"


async def follow(port: int) -> None:
    """Submit what the input asks for until it ends. Raises RuntimeError for a request that is not finished."""
    numbers = itertools.count()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        watched = (stub.WatchState(pb.WatchStateRequest()), stub.KvSync(pb.KvSyncRequest()))
        readers = [asyncio.create_task(_read(stream)) for stream in watched]
        stream = stub.Connect()
        messages = aiter(stream)
        await stream.write(pb.ConnectFrames(frames=[pb.ConnectFrame(hello=pb.Hello(gateway_id="recorder"))]))
        while line := await asyncio.to_thread(sys.stdin.readline):
            wanted = json.loads(line)
            sampling = pb.Sampling(max_tokens=wanted["output_tokens"])
            submits = [
                pb.Submit(request_id=str(next(numbers)), attempt=1, prompt_ids=prompt, sampling=sampling)
                for prompt in wanted["prompts"]
            ]
            await stream.write(pb.ConnectFrames(frames=[pb.ConnectFrame(submit=submit) for submit in submits]))
            running = {submit.request_id for submit in submits}
            while running:
                message = await anext(messages)
                for output in message.outputs:
                    if output.WhichOneof("end") in ("handoff", "error"):
                        raise RuntimeError(f"the worker did not finish a request: {output}")
                    if output.WhichOneof("end"):
                        running.discard(output.request_id)
            print(DONE, flush=True)
        for reader in readers:
            reader.cancel()


async def _read(stream: AsyncIterable[object]) -> None:
    async for _ in stream:
        pass


if __name__ == "__main__":
    asyncio.run(follow(int(sys.argv[1])))
