"""Tokens with log probabilities over gRPC: python examples/grpc_generate.py [host:port]."""

from __future__ import annotations

import sys

from ryzanstein_client.grpc import GrpcClient


def main() -> None:
    """Generate, and show how sure the model was."""
    address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:8001"
    with GrpcClient(address) as client:
        print("models:", ", ".join(model.id for model in client.models()))
        answer = client.complete("The capital of France is", max_tokens=8, temperature=0, logprobs=3)
        print(answer.text)
        for token in answer.logprobs:
            others = ", ".join(f"{other.token_id}: {other.logprob:.2f}" for other in token.top)
            print(f"{token.token_id:>6} {token.logprob:6.2f}  ({others})")


if __name__ == "__main__":
    main()
