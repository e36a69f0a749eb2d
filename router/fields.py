"""Reading one field of a request: its type and range checked, the field named in the refusal."""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn

from moonrelay.errors import InvalidRequest

Reader = Callable[[Any, str], Any]
SHOWN_MAX: Final = 40
UINT64_MAX: Final = (1 << 64) - 1


def refuse(param: str, expected: str, found: object) -> NoReturn:
    raise InvalidRequest(f"{param}: expected {expected}, found {shown(found)}", param=param)


def unsupported(param: str, why: str) -> NoReturn:
    raise InvalidRequest(f"{param}: {why}", param=param)


def shown(value: object) -> str:
    """A value as an error message may carry it: short, and never a prompt's text in full."""
    if isinstance(value, str):
        cut = value if len(value) <= SHOWN_MAX else value[:SHOWN_MAX] + "..."
        return f"the string {cut!r}"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return "a number too large" if abs(value) >= 1e21 else str(value)
    return "an array" if isinstance(value, list | tuple) else "an object"


def text(value: Any, param: str) -> str:
    if not isinstance(value, str):
        refuse(param, "a string", value)
    return value


def name(value: Any, param: str) -> str:
    if not isinstance(value, str) or not value:
        refuse(param, "a non-empty string", value)
    return value


def boolean(value: Any, param: str) -> bool:
    if not isinstance(value, bool):
        refuse(param, "a boolean", value)
    return value


def mapping(value: Any, param: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        refuse(param, "an object", value)
    return value


def integer(low: int, high: int | None = None) -> Reader:
    """A whole number in [low, high]; 3.0 is one, as JSON has a single kind of number."""
    expected = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"

    def read(value: Any, param: str) -> int:
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not whole or value < low or (high is not None and value > high):
            refuse(param, expected, value)
        return int(value)

    return read


def number(low: float, high: float, *, above_low: bool = False) -> Reader:
    """A finite number in [low, high], or in (low, high] with `above_low`; as fp32, which is what the wire carries."""
    expected = f"a number {'above' if above_low else 'from'} {low:g} {'up ' if above_low else ''}to {high:g}"

    def read(value: Any, param: str) -> float:
        fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not fits or value < low or value > high or (above_low and ctypes.c_float(value).value == low):
            refuse(param, expected, value)
        return float(value)

    return read


def only(allowed: Sequence[Any], why: str) -> Reader:
    """A field we know but do not serve: only the values that mean the default behaviour pass."""

    def read(value: Any, param: str) -> Any:
        if not any(value == ok and isinstance(value, bool) == isinstance(ok, bool) for ok in allowed):
            unsupported(param, why)
        return value

    return read


def stop_strings(value: Any, param: str, *, count_max: int = 4, chars_max: int = 1_024) -> tuple[str, ...]:
    """One string or a list of up to `count_max`, none empty."""
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, list):
        refuse(param, f"a string or an array of up to {count_max} strings", value)
    if len(given) > count_max:
        refuse(param, f"at most {count_max} strings", len(given))
    for index, item in enumerate(given):
        where = param if isinstance(value, str) else f"{param}[{index}]"
        if len(name(item, where)) > chars_max:
            refuse(where, f"at most {chars_max} characters", len(item))
    return tuple(given)


def logit_bias(
    value: Mapping[str, Any], param: str, vocab_size: int, *, count_max: int = 1_024
) -> tuple[tuple[int, float], ...]:
    """Token ids, as JSON's strings, and what is added to their logits. Raises: InvalidRequest."""
    if len(value) > count_max:
        refuse(param, f"at most {count_max} tokens", len(value))
    bias = number(-100, 100)
    found = {}
    for key, item in value.items():
        if not (key.isascii() and key.isdigit()) or len(key) > 10 or int(key) >= vocab_size:
            refuse(param, f"token ids from 0 to {vocab_size - 1} as keys", key)
        found[int(key)] = bias(item, f"{param}.{key}")
    return tuple(sorted(found.items()))


def token_ids(value: Sequence[Any], param: str, vocab_size: int) -> list[int]:
    """Ids in [0, vocab_size). A million are checked without a Python loop; only a bad list is searched."""
    try:
        if set(map(type, value)) <= {int} and max(array("I", value), default=0) < vocab_size:
            return list(value)
    except OverflowError:
        pass  # one is negative or enormous
    read = integer(0, vocab_size - 1)
    for index, item in enumerate(value):
        if type(item) is not int or not 0 <= item < vocab_size:
            read(item, f"{param}[{index}]")
    return [int(item) for item in value]
