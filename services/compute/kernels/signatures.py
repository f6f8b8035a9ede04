"""Signatures of the compiled libraries' functions, read from `source/kernels.h`.

Python's calls, the capture and the generated code of replays all follow these signatures, and the C compiler checks
them against the definitions. This file imports only the standard library, because the build runs without our package.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Literal, NamedTuple

Kind = Literal["pointer", "long", "int", "float", "row_count", "sequence_count"]

HEADER = Path(__file__).resolve().with_name("source") / "kernels.h"
REDUCE = (
    "all_reduce"  # a step's collective, replayed like a kernel; its arguments are the summand, its rows and their width
)
REDUCE_ARGUMENTS: tuple[Kind, ...] = ("pointer", "row_count", "long")

_FUNCTION = re.compile(r"^(REPLAYED )?(void|long|int) (rz_\w+)\(([^)]*)\);", re.MULTILINE)
_PARAMETER = re.compile(r"(?:const )?(\w+) (\*?)(\w+)")
_IN_C: dict[Kind, str] = {
    "pointer": "a[{}].p",
    "long": "a[{}].i",
    "int": "(int)a[{}].i",
    "float": "a[{}].f",
    "row_count": "ROW_COUNT(a[{}])",
    "sequence_count": "SEQUENCE_COUNT(a[{}])",
}


class Function(NamedTuple):
    """An exported function."""

    name: str
    replayed: bool
    result: str  # "void", "long" or "int"
    names: tuple[str, ...]  # names of the arguments
    kinds: tuple[Kind, ...]  # kinds of the arguments


def read_functions(header: Path = HEADER) -> tuple[Function, ...]:
    """All functions in the order of the header. Raises ValueError for an argument of an unknown kind."""
    return tuple(
        Function(name, bool(replayed), result, *_read_parameters(name, parameters))
        for replayed, result, name, parameters in _FUNCTION.findall(header.read_text())
    )


def _read_parameters(function: str, parameters: str) -> tuple[tuple[str, ...], tuple[Kind, ...]]:
    names, kinds = list[str](), list[Kind]()
    for parameter in parameters.split(","):
        match = _PARAMETER.fullmatch(parameter.strip())
        if match is None:
            raise ValueError(f"{function}: cannot read the parameter {parameter.strip()!r}")
        type_, star, name = match.groups()
        if not star and type_ not in _IN_C:
            allowed = ", ".join(kind for kind in _IN_C if kind != "pointer")
            raise ValueError(f"{function}: {name} is {type_}; arguments are pointers, {allowed}")
        names.append(name)
        kinds.append("pointer" if star else type_)  # type: ignore[arg-type]
    return tuple(names), tuple(kinds)


def fingerprint(functions: tuple[Function, ...]) -> str:
    """Hash of the signatures; a library compiled from another header has another fingerprint."""
    return hashlib.sha256(repr([tuple(function) for function in functions]).encode()).hexdigest()[:16]


def calls_header(functions: tuple[Function, ...]) -> str:
    """Text of `calls.h`: calls of functions whose numbers and arguments lie in memory (replay.c).

    The including file defines the macros ROW_COUNT and SEQUENCE_COUNT, which replace the captured counts.
    """
    replayed, others = (
        [f for f in functions if f.replayed is wanted and f.result == "void"] for wanted in (True, False)
    )
    lines = [
        "// Made from kernels.h by signatures.py.",
        f'#define FINGERPRINT "{fingerprint(functions)}"',
        f"#define ARGUMENTS {most_arguments(functions)}",
        f"enum {{ {_numbered(replayed)}, REDUCE, {_numbered(others)} }};",
        f"#define CALLS_OF_A_STEP {_cases(replayed)}",
        f"#define OTHER_CALLS {_cases(others)}",
    ]
    return "\n".join(lines) + "\n"


def most_arguments(functions: tuple[Function, ...]) -> int:
    """Largest number of arguments of a function."""
    return max(len(function.kinds) for function in functions)


def _numbered(functions: list[Function]) -> str:
    return ", ".join(function.name.upper() for function in functions)


def _cases(functions: list[Function]) -> str:
    return " ".join(
        f"case {f.name.upper()}: {f.name}({', '.join(_IN_C[kind].format(i) for i, kind in enumerate(f.kinds))}); break;"
        for f in functions
    )
