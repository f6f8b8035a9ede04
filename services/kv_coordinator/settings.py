"""Configuration of the KV-cache coordinator."""

from __future__ import annotations

import re
from typing import Annotated, Self
from zlib import crc32

from pydantic import BeforeValidator, Field, model_validator

from services.common.settings import PREFIX, ServiceSettings


def _number_of(name: object) -> int:
    number = re.search(r"\d+$", str(name))
    if number is None:
        raise ValueError("must be a number, or a name that ends with one")
    return int(number[0])


class CoordinatorSettings(ServiceSettings):
    """Environment variables ``RYZANSTEIN_*`` of the coordinator."""

    coordinator_port: int = Field(default=50053, ge=0, le=65535, description="gRPC port; 0 picks a free one")
    coordinator_shards: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Number of coordinators, which divide the workers among themselves; routers ask all of them",
    )
    coordinator_shard: Annotated[int, BeforeValidator(_number_of)] = Field(
        default=0, description="This one's number, from 0, or a name that ends with it, such as a pod's"
    )

    @model_validator(mode="after")
    def _one_of_the_shards(self) -> Self:
        if self.coordinator_shard >= self.coordinator_shards:
            raise ValueError(f"{PREFIX}COORDINATOR_SHARD: must be below {PREFIX}COORDINATOR_SHARDS")
        return self

    def follows(self, worker_id: str) -> bool:
        """Whether this coordinator follows the worker. Each worker has exactly one."""
        return crc32(worker_id.encode()) % self.coordinator_shards == self.coordinator_shard
