"""Cutting text to a number of bytes without breaking a character."""

from __future__ import annotations


def cut(text: str, max_bytes: int) -> tuple[str, bool]:
    """(text of at most ``max_bytes`` UTF-8 bytes, whether anything was cut)."""
    raw = text.encode()
    if len(raw) <= max_bytes:
        return text, False
    return raw[:max_bytes].decode(errors="ignore"), True
