"""Text that people are shown: stripped of what could mislead, bounded, masked (D57, D88)."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from typing import Any

MASK = "******"
ELLIPSIS = "…"

#: Category Cf holds bidi overrides, isolates and zero-width characters; Cc controls; Cs surrogates.
_MISLEADING = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def clean(text: str, limit: int | None = None, *, keep_lines: bool = False) -> str:
    """``text`` without control, bidi and zero-width characters, cut to ``limit`` characters.

    White space becomes one space, so that nothing can be pushed out of sight; ``keep_lines`` keeps
    line feeds.
    """
    kept = "".join(_visible(character, keep_lines) for character in text)
    lines = kept.split("\n") if keep_lines else [kept]
    shown = "\n".join(" ".join(line.split()) for line in lines).strip()
    return shown if limit is None else cut(shown, limit)


def cut(text: str, limit: int) -> str:
    """At most ``limit`` characters; a cut text ends in an ellipsis."""
    return text if len(text) <= limit else text[: max(0, limit - 1)] + ELLIPSIS


def masked(value: Any, paths: Iterable[str]) -> Any:
    """A copy of a JSON value with what lies at the dotted ``paths`` replaced by ``MASK``.

    A path reaches into every element of a list it meets (``contacts.phone``; ``contacts[*].phone``
    says the same), and a masked object or list is hidden whole.
    """
    shown = value
    for path in paths:
        shown = _mask(shown, tuple(path.replace("[*]", "").replace("[]", "").split(".")))
    return shown


def _mask(value: Any, path: tuple[str, ...]) -> Any:
    if not path:
        return MASK
    if isinstance(value, list):
        return [_mask(item, path) for item in value]
    if isinstance(value, dict) and path[0] in value:
        return {key: _mask(item, path[1:]) if key == path[0] else item for key, item in value.items()}
    return value


def _visible(character: str, keep_lines: bool) -> str:
    if character == "\n" and keep_lines:
        return character
    if character.isspace():
        return " "
    return "" if unicodedata.category(character) in _MISLEADING else character
