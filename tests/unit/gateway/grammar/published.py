"""Schemas as pydantic and zod write them: every kind of type that has keywords of its own."""

from __future__ import annotations

import datetime
import decimal
import enum
import ipaddress
import pathlib
import re
import uuid
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field, TypeAdapter


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Cat(pydantic.BaseModel):
    kind: Literal["cat"] = "cat"
    lives: Annotated[int, Field(ge=0, le=9)]


class Dog(pydantic.BaseModel):
    kind: Literal["dog"] = "dog"
    barks: bool = True


class Tree(pydantic.BaseModel):
    left: Tree | None = None
    right: Tree | None = None
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]


class Open(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    a: bool


class Child(Cat):
    colour: Colour
    anything: Any = None


_TYPES: list[Any] = [
    *(pathlib.Path, pydantic.SecretStr, bytes, ipaddress.IPv4Network, ipaddress.IPv6Address, ipaddress.IPv4Address),
    *(re.Pattern, decimal.Decimal, datetime.datetime, datetime.date, datetime.time, datetime.timedelta, uuid.UUID),
    *(pydantic.AnyUrl, pydantic.PostgresDsn, pydantic.Json, pydantic.ByteSize, pydantic.Base64Bytes, pydantic.UUID4),
    *(pydantic.PositiveInt, pydantic.NegativeFloat, pydantic.PastDate, float, int, bool, None, Any, complex),
    *(dict, list, dict[Literal["a", "b"], bool], dict[Colour, int], dict[int, str], dict[uuid.UUID, int]),
    *(dict[datetime.date, bool], set[str], frozenset[bool], set[Literal["a", "b", "c"]], set[Colour], tuple[int, str]),
    *(tuple[bool, ...], list[Cat | Dog], Cat, Child, Tree, Open, int | str | None, Literal["x", 1, True, None]),
    Annotated[dict[str, bool], Field(min_length=1, max_length=2)],
    Annotated[dict[str, bool], Field(min_length=2)],
    Annotated[dict[Annotated[str, Field(pattern="^k[0-9]$")], int], Field()],
    Annotated[dict[Annotated[str, Field(pattern="^k", max_length=4)], int], Field()],
    Annotated[int, Field(ge=-(2**63), le=2**63 - 1)],
    Annotated[int, Field(multiple_of=5, gt=0, lt=100)],
    Annotated[decimal.Decimal, Field(max_digits=5, decimal_places=2)],
    Annotated[list[int], Field(min_length=1, max_length=3)],
    Annotated[Cat | Dog, Field(discriminator="kind")],
]
PYDANTIC = [TypeAdapter(kind).json_schema() for kind in _TYPES] + [
    # the pattern of versions before 2.12 for Decimal
    {"anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}]},
]

_EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
_DURATION = r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$"
_HOSTNAME = (
    r"^(?=.{1,253}\.?$)[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
    r"(?:\.[a-zA-Z0-9](?:[-0-9a-zA-Z]{0,61}[0-9a-zA-Z])?)*\.?$"
)
_DATE = (
    r"^(?:(?:\d\d[2468][048]|\d\d[13579][26]|\d\d0[48]|[02468][048]00|[13579][26]00)-02-29|\d{4}-(?:(?:0[13578]|1[02])-"
    r"(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|(?:02)-(?:0[1-9]|1\d|2[0-8])))$"
)
_TIME = r"^(?:[01]\d|2[0-3]):[0-5]\d(?::[0-5]\d(?:\.\d+)?)?$"
_UUID = (
    r"^([0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[1-8][0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}|"
    r"00000000-0000-0000-0000-000000000000|ffffffff-ffff-ffff-ffff-ffffffffffff)$"
)
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9][0-9]|[0-9])"
_IPV4 = rf"^(?:{_BYTE}\.){{3}}{_BYTE}$"
_BASE64 = r"^$|^(?:[0-9a-zA-Z+/]{4})*(?:(?:[0-9a-zA-Z+/]{2}==)|(?:[0-9a-zA-Z+/]{3}=))?$"
ZOD_FORMATS = {
    "email": _EMAIL,
    "duration": _DURATION,
    "hostname": _HOSTNAME,
    "date": _DATE,
    "time": _TIME,
    "date-time": _DATE[:-1] + r"T(?:(?:[01]\d|2[0-3]):[0-5]\d(?::[0-5]\d(?:\.\d+)?)?(?:Z))$",
    "uuid": _UUID,
    "guid": r"^([0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12})$",
    "ipv4": _IPV4,
    "cidrv4": _IPV4[:-1] + r"\/([0-9]|[1-2][0-9]|3[0-2])$",
    "base64": _BASE64,
    "base64url": r"^[A-Za-z0-9_-]*$",
    "cuid": r"^[cC][^\s-]{8,}$",
    "cuid2": r"^[0-9a-z]+$",
    "ulid": r"^[0-9A-HJKMNP-TV-Za-hjkmnp-tv-z]{26}$",
    "nanoid": r"^[a-zA-Z0-9_-]{21}$",
    "e164": r"^\+[1-9]\d{6,14}$",
    "emoji": r"^(\p{Extended_Pictographic}|\p{Emoji_Component})+$",
    "starts_with": "^abc.*",
    "ends_with": ".*abc$",
    "includes": "abc",
    "lowercase": "^[^A-Z]*$",
}
_DIALECT = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
_ONE_OF_KINDS = [
    {
        "type": "object",
        "properties": {"kind": {"type": "string", "const": kind}, "v": {"type": "boolean"}},
        "required": ["kind", "v"],
        "additionalProperties": False,
    }
    for kind in ("a", "b")
]
ZOD = [
    *(_DIALECT | {"type": "string", "format": name, "pattern": pattern} for name, pattern in ZOD_FORMATS.items()),
    *(_DIALECT | {"type": "string", "format": name} for name in ("jwt", "json-string", "uri", "ipv6", "cidrv6", "xid")),
    {"type": "string", "contentEncoding": "base64", "contentMediaType": "image/png"},
    {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991},
    {"type": "integer", "exclusiveMinimum": 0, "maximum": 9007199254740991},
    {"type": "number", "minimum": -3.4028234663852886e38, "maximum": 3.4028234663852886e38},
    {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "boolean"}},
    {
        "type": "object",
        "propertyNames": {"type": "string", "enum": ["a", "b"]},
        "additionalProperties": {"type": "boolean"},
        "required": ["a", "b"],
    },
    {"type": "object", "properties": {"a": {"default": 1, "type": "number"}}, "additionalProperties": {}},
    {"anyOf": _ONE_OF_KINDS},
    {"oneOf": _ONE_OF_KINDS},
    {"allOf": [_ONE_OF_KINDS[0] | {"additionalProperties": {}}, {"type": "object", "properties": {"w": {"const": 1}}}]},
    {"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "null"}], "items": {"type": "boolean"}},
    {"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}}}},
    {"not": {}},
    {"enum": ["a", 1, None], "readOnly": True, "title": "T", "examples": ["a"], "deprecated": True, "id": "x"},
    # zod 3 with zod-to-json-schema
    {"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/definitions/M",
     "definitions": {"M": {"type": "object", "properties": {"s": {"type": "array", "items": {"type": "boolean"},
                     "uniqueItems": True}}, "required": ["s"], "additionalProperties": False}}},
    {"type": ["string", "null"], "format": "cuid2", "minLength": 1},
]  # fmt: skip
