"""The gRPC transport; needs the extra `grpc`."""

from ryzanstein_client.grpc.aio import AsyncGrpcClient
from ryzanstein_client.grpc.client import GrpcClient

__all__ = ["AsyncGrpcClient", "GrpcClient"]
