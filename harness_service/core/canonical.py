"""JSON in, one canonical byte string out (D37, D49).

What makes two values the same, and hence two writes the same intent:

* keys are sorted by code point, no white space, UTF-8 without escapes but the necessary ones;
* types count: ``1`` and ``"1"`` differ, ``null`` and a missing key differ;
* a number is a number: ``1``, ``1.0`` and ``1e0`` are one value, written ``1``; ``-0`` is ``0``;
  integers keep all their digits; other floats are written as the shortest text that reads back;
* text is compared as it came: NFC and NFD differ, since a tool may tell them apart.
"""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

MAX_DEPTH = 64
MAX_KEYS = 10_000
MAX_INTEGER = 2**63 - 1
_EXACT_FLOAT = 2.0**53


class JsonRefused(ValueError):
    """Not RFC 8259, or over a limit; the text says which, without quoting the input."""


def parse_json(text: str | bytes, *, max_depth: int = MAX_DEPTH, max_keys: int = MAX_KEYS) -> Any:
    """One JSON document within the limits.

    Refused: depth over 64, more than 10 000 keys, NaN and infinities (``1e400`` too), integers of
    2^63 and more, duplicate keys, lone surrogates.
    """
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_int=_integer)
    except RecursionError:
        raise JsonRefused(f"nested deeper than {max_depth}") from None
    except JsonRefused:
        raise
    except ValueError:
        raise JsonRefused("not valid JSON") from None
    _check_limits(value, max_depth, max_keys)
    return value


def canonical(value: Any) -> str:
    """The canonical text of a JSON value; equal values give equal text."""
    return json.dumps(_normal(value), ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def sha256_hex(data: bytes) -> str:
    """SHA-256 in lower-case hex."""
    return hashlib.sha256(data).hexdigest()


def digest(value: Any) -> str:
    """SHA-256 of the canonical bytes of a JSON value."""
    return sha256_hex(canonical(value).encode())


def _normal(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT_FLOAT:
        return int(value)
    if isinstance(value, dict):
        return {key: _normal(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_normal(item) for item in value]
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        raise JsonRefused("the same key occurs twice in one object")
    return unique


def _no_constant(name: str) -> None:
    raise JsonRefused(f"{name} is not a JSON number")


def _integer(digits: str) -> int:
    if len(digits) > len(str(MAX_INTEGER)) + 1 or abs(int(digits)) > MAX_INTEGER:
        raise JsonRefused("an integer does not fit 64 bits")
    return int(digits)


def _check_limits(value: Any, max_depth: int, max_keys: int) -> None:
    keys = 0
    level = [value]
    for _ in range(max_depth + 1):
        following: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                keys += len(item)
                following.extend(item.values())
                for key in item:
                    _check_text(key)
            elif isinstance(item, list):
                following.extend(item)
            elif isinstance(item, str):
                _check_text(item)
            elif isinstance(item, float) and not math.isfinite(item):
                raise JsonRefused("a number is too large")
        if keys > max_keys:
            raise JsonRefused(f"more than {max_keys} keys")
        if not following:
            return
        level = following
    raise JsonRefused(f"nested deeper than {max_depth}")


def _check_text(text: str) -> None:
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise JsonRefused("text holds half of a surrogate pair")
