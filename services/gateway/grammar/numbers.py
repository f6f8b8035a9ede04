"""Makes a schema's numbers ones that llguidance follows to the last digit, or refuses it with the number's path.

llguidance reads numbers as doubles, prints them with the fewest digits, and counts integers in 64 bits. So a value must
be below 2^63 and print as itself. A bound may be narrowed at the end that is farther from zero: then some valid answers
cannot be written, but no answer is invalid.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from services.gateway.grammar.subschemas import Node, combined, escaped, walk

Number = int | float

_EXACT = 2**53
_LARGEST = 2**63
_ROUND = 10**15  # doubles with this many digits print as they are
_OPEN_TO = 10**18  # a larger lower bound needs an upper one to compile
_TINY = 1e-50  # the smallest positive bound that compiles
_MOST_STEPS, _MOST_DIGITS = 10_000, 2048  # `multipleOf` in units, and without its zeros: others cost too much
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_SHOWN = 40  # digits in a message


def make_whole(root: Node) -> None:
    """Turn doubles without a fraction in `const` and `enum` into integers, in place: 1e3 is 1000."""
    for _, node in walk(root):
        for keyword in {"const", "enum"} & node.keys():
            node[keyword] = _whole(node[keyword])


def _whole(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_whole(item) for item in value]
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    return value


def make_exact(root: Node, pointer: str, node: Node) -> None:
    """Check `const`, `enum` and `multipleOf`, and rewrite bounds, in place; raises ValueError with the path."""
    for keyword in ("const", "enum"):
        for path, value in _numbers(f"{pointer}/{keyword}", node.get(keyword)):
            if abs(value) >= _LARGEST or float(value) != value or _read(value) != value:
                reason = "a grammar writes 15 digits, and integers up to 2^63 that a double holds"
                raise _refused(path, value, f"{reason}; ask for a string")
    _check_steps(root, pointer, node)
    _rewrite_bounds(pointer, node)


def _numbers(path: str, value: object) -> Iterator[tuple[str, Number]]:
    """All numbers in a JSON value with their paths."""
    waiting = [(path, value)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield path, value
        elif isinstance(value, dict):
            waiting += [(f"{path}/{escaped(key)}", item) for key, item in value.items()]
        elif isinstance(value, list):
            waiting += [(f"{path}/{i}", item) for i, item in enumerate(value)]


def _read(number: Number) -> float:
    """The double that llguidance reads: the digits as a double, times or over a power of ten."""
    if isinstance(number, int):
        return float(number)
    sign, digits, exponent = Decimal(repr(number)).as_tuple()
    whole, power = float("".join(map(str, digits))), float(f"1e{abs(int(exponent))}")
    size = whole * power if int(exponent) >= 0 else whole / power
    return -size if sign else size


def _check_steps(root: Node, pointer: str, node: Node) -> None:
    """Refuse a `multipleOf` that llguidance rounds or counts too long, alone or with those of combined schemas."""
    steps = [part["multipleOf"] for part in combined(root, node) if "multipleOf" in part]
    if not steps:
        return
    exact = [Decimal(repr(step)) for step in steps]
    unit = min(Decimal(1).scaleb(int(step.normalize().as_tuple().exponent)) for step in [*exact, Decimal(1)])
    together = math.lcm(*(int(step / unit) for step in exact))
    costly = together > _MOST_STEPS or int(str(together).rstrip("0")) > _MOST_DIGITS
    if costly or not all(map(_is_read_exactly, steps)):
        reason = f"a grammar follows steps with digits up to {_MOST_DIGITS}, as 0.05, 12 or 3600, up to {_MOST_STEPS}"
        raise _refused(f"{pointer}/multipleOf", steps[0], reason)


def _is_read_exactly(step: Number) -> bool:
    """Whether llguidance reads a decimal exactly: it multiplies a double by ten until no fraction is left."""
    read, digits = _read(step), 0
    while not read.is_integer() and digits < 16:
        read, digits = read * 10, digits + 1
    return Decimal(repr(read)).scaleb(-digits) == Decimal(repr(step))


def _rewrite_bounds(pointer: str, node: Node) -> None:
    """Replace the bounds by `minimum` and `maximum` that are followed exactly, or narrowed far from zero."""
    given = {keyword: node.pop(keyword) for keyword in (*_LOWER, *_UPPER) if keyword in node}
    kinds = node.get("type", "number")
    kinds = {kinds} if isinstance(kinds, str) else {*map(str, kinds)}
    if not given or not kinds & {"number", "integer"}:
        return
    whole = "number" not in kinds
    low = _inclusive(given, _LOWER, 1, whole=whole)
    high = _inclusive(given, _UPPER, -1, whole=whole)
    negative = high is not None and high < 0
    near, far = (_negated(high), _negated(low)) if negative else (low, high)
    followed = _narrowed(near, far, whole=whole, most=_LARGEST - 1 if whole and not negative else _LARGEST - 1024)
    if followed is None:
        sides = (*_UPPER, *_LOWER) if negative else (*_LOWER, *_UPPER)
        keyword = next(keyword for keyword in sides if keyword in given)
        raise _refused(f"{pointer}/{keyword}", given[keyword], "no grammar counts to it exactly; ask for a string")
    low, high = (_negated(followed[1]), _negated(followed[0])) if negative else followed
    node |= {keyword: bound for keyword, bound in (("minimum", low), ("maximum", high)) if bound is not None}


def _inclusive(given: Node, keywords: tuple[str, str], inward: int, *, whole: bool) -> Number | None:
    """The bound of one side, itself included; `inward`: 1 for a lower bound, -1 for an upper one."""
    inclusive, exclusive = (given.get(keyword) for keyword in keywords)
    if isinstance(exclusive, bool):  # as in draft 4
        inclusive, exclusive = (None, inclusive) if exclusive else (inclusive, None)
    bounds: list[Number] = []
    if inclusive is not None:
        bounds.append(_rounded(inclusive, inward) if whole else inclusive)
    if exclusive is not None:
        bounds.append(_rounded(exclusive, -inward) + inward if whole else _next(exclusive, inward))
    bound = max((bound + 0 for bound in bounds), key=lambda bound: bound * inward, default=None)  # -0.0 + 0 is 0.0
    while isinstance(bound, float) and _TINY <= abs(bound) < _EXACT and _read(bound) != bound:
        bound = math.nextafter(bound, inward * math.inf)
    return bound


def _rounded(bound: Number, up: int) -> int:
    return math.ceil(bound) if up > 0 else math.floor(bound)


def _next(bound: Number, inward: int) -> float:
    """The next double: readers round digits, so a text just beyond an exclusive bound would be read as the bound."""
    try:
        following = math.nextafter(bound, inward * math.inf)
    except OverflowError:
        return math.copysign(math.inf, bound)
    return inward * _TINY if bound == 0 else following


def _negated(bound: Number | None) -> Number | None:
    return None if bound is None else -bound


def _narrowed(
    near: Number | None, far: Number | None, most: int, *, whole: bool
) -> tuple[Number | None, Number | None] | None:
    """Bounds of which the grammar follows each exactly; only the far one, at least twice the near one, may move.

    `most`: the largest far bound. None if the near bound would have to move.
    """
    if near is None or near <= 0:
        low = near if not near else -_followed(-near, _LARGEST - 1024, whole=whole)
        return low, None if far is None else _followed(far, most, whole=whole)
    if near < _TINY or near != _followed(near, _LARGEST - 1024, whole=whole):
        return None
    if far is None:
        far = math.inf if near >= _OPEN_TO else None
    moved = None if far is None else _followed(far, most, whole=whole)
    return (near, moved) if moved == far or (moved or 0) >= 2 * near else None


def _followed(bound: Number, most: int, *, whole: bool) -> Number:
    """The largest bound up to a positive one that the grammar follows exactly."""
    if bound <= _EXACT:
        return 0 if bound < _TINY else bound
    if bound >= most:
        bound = most
        if whole:
            return bound
    exact = math.floor(bound)
    if not whole:  # the digits that a double prints with are not always its own
        unit = max(10 ** len(str(exact)) // _ROUND, 1)
        return exact if int(Decimal(repr(float(exact)))) == exact else exact // unit * unit
    double = float(exact)
    return int(double if double <= exact else math.nextafter(double, 0))


def _refused(path: str, value: object, reason: str) -> ValueError:
    shown = repr(value)
    shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
    return ValueError(f"`{path}` is {shown}: {reason}")
