"""The page of gRPC contracts, from proto/ with its comments."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet
from grpc_tools import protoc

PROTO = Path(__file__).resolve().parents[2] / "proto"
_SERVICE, _METHOD, _MESSAGE, _FIELD = 6, 2, 4, 2  # field numbers in descriptor.proto: the path of a comment


def grpc_reference() -> str:
    """Services, methods and messages with their comments."""
    lines = ["# gRPC contracts", "", "Made by `make reference` from `proto/ryzanstein/v1`."]
    for file in _descriptors():
        comments = {tuple(place.path): _comment(place) for place in file.source_code_info.location}
        lines += ["", f"## {file.name}"]
        lines += _services(file, comments)
        lines += _messages(file, comments)
    return "\n".join(lines) + "\n"


def _descriptors() -> list[FileDescriptorProto]:
    sources = sorted(str(path.relative_to(PROTO)) for path in PROTO.rglob("*.proto") if "google" not in path.parts)
    with tempfile.NamedTemporaryFile() as out:
        include = [f"--proto_path={PROTO}", f"--proto_path={files('grpc_tools') / '_proto'}"]
        status = protoc.main(
            ["protoc", *include, "--include_source_info", f"--descriptor_set_out={out.name}", *sources]
        )
        if status != 0:
            raise RuntimeError(f"protoc failed with status {status}")
        return list(FileDescriptorSet.FromString(Path(out.name).read_bytes()).file)


def _comment(place: object) -> str:
    leading, trailing = getattr(place, "leading_comments", ""), getattr(place, "trailing_comments", "")
    return " ".join((leading or trailing).split())


def _services(file: FileDescriptorProto, comments: dict[tuple[int, ...], str]) -> Iterator[str]:
    for s, service in enumerate(file.service):
        yield from ("", f"### service {service.name}", "", comments.get((_SERVICE, s), ""), "")
        yield from ("| method | request | response | |", "|---|---|---|---|")
        for m, method in enumerate(service.method):
            request = ("stream " if method.client_streaming else "") + _short(method.input_type)
            response = ("stream " if method.server_streaming else "") + _short(method.output_type)
            yield f"| `{method.name}` | {request} | {response} | {comments.get((_SERVICE, s, _METHOD, m), '')} |"


def _messages(file: FileDescriptorProto, comments: dict[tuple[int, ...], str]) -> Iterator[str]:
    for m, message in enumerate(file.message_type):
        yield from ("", f"### {message.name}", "", comments.get((_MESSAGE, m), ""), "")
        if not message.field:
            continue
        yield from ("| field | type | |", "|---|---|---|")
        for f, field in enumerate(message.field):
            yield f"| `{field.name}` | {_type(field)} | {comments.get((_MESSAGE, m, _FIELD, f), '')} |"


def _type(field: FieldDescriptorProto) -> str:
    name = _short(field.type_name) or FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    return f"repeated {name}" if field.label == FieldDescriptorProto.LABEL_REPEATED else name


def _short(name: str) -> str:
    return name.removeprefix(".ryzanstein.v1.")
