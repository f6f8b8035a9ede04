"""A request in the native engine, from `submit` until its end."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ryzanstein.v1 import worker_pb2 as pb

from services.common.blockhash import ImageSpan, adapted_root, chain_root
from services.worker.adapters.slots import AdapterSlots
from services.worker.engine.base import OutputSink
from services.worker.engine.request import EngineRequest
from services.worker.protocol.plan import Frame
from services.worker.scheduling.request import Request


def frames_of(request: EngineRequest, takes: pb.ImageInput) -> list[Frame]:
    """The frames of a checked request's images, with the positions of their placeholders."""
    frames, n_tokens, n_bytes = [], takes.frame_tokens, 3 * takes.frame_size**2
    for image in request.images:
        if image.columns:
            n_rows = len(image.frames) // (3 * takes.cell**2)
            first = list(request.prompt_ids).index(takes.token, image.first)
            frames.append(Frame(first, n_rows, image.frames, image.columns))
            continue
        span = range(image.first, image.first + image.tokens)
        side = math.isqrt(n_tokens)
        firsts = [position for position in span if request.prompt_ids[position] == takes.token][::n_tokens]
        for number, first in enumerate(firsts):
            frames.append(Frame(first, n_tokens, image.frames[number * n_bytes : (number + 1) * n_bytes], side))
    return frames


@dataclass(slots=True, eq=False, kw_only=True)
class LiveRequest(Request):
    """A request that came through `submit`, unlike the start-up probe."""

    request: EngineRequest
    sink: OutputSink
    held: AdapterSlots | None = None  # where its adapter is in use

    @classmethod
    def of(
        cls, request: EngineRequest, sink: OutputSink, hash_root: str, takes: pb.ImageInput | None = None
    ) -> LiveRequest:
        """The scheduler's request for an engine request; `takes`: the images that the model takes."""
        root = adapted_root(hash_root, request.adapter.digest if request.adapter else "")
        return cls(
            request=request,
            sink=sink,
            token_ids=[*request.prompt_ids, *request.generated_ids],
            n_prompt=len(request.prompt_ids),
            sampling=request.sampling,
            max_tokens=request.sampling.max_tokens,
            tenant=request.tenant,
            weight=request.weight,
            priority=request.priority,
            chain_root=chain_root(root, request.cache_salt),
            embed=request.embed,
            second_from=request.second_from,
            trial_tokens=request.trial_tokens,
            prediction_ids=request.prediction_ids,
            images=[ImageSpan(image.first, image.first + image.tokens, image.digest) for image in request.images],
            frames=frames_of(request, takes) if takes is not None else (),
        )

    @property
    def begun(self) -> bool:
        """Whether it is in a slot of the ranks."""
        return self.slot >= 0

    @property
    def pull(self) -> pb.PullHint | None:
        """Another worker that holds more of its prefix; None: it computes the prefix."""
        return self.request.pull if self.reads_cache else None

    def give_back(self) -> None:
        """End the use of its adapter."""
        if self.held is not None and self.request.adapter is not None:
            self.held.give_back(self.request.adapter.digest)

    def hand_off(self, handoff: pb.Handoff) -> None:
        """Tell its client that another worker has to go on."""
        self.sink.hand_off(self.request, handoff)
        self.sink.flush(0)
