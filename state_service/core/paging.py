"""Page tokens: where a listing goes on, opaque to whoever carries it (wire.md, list requests)."""

from __future__ import annotations

import base64
import binascii

import msgspec

from state_service.ports import Cursor, Page
from turnfence.errors import invalid

PAGE_DEFAULT = 50
PAGE_MAX = 200


class _Token(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    listing: str
    cursor: list[int]


def page(listing: str, size: int, token: str) -> Page:
    """The page that a request asks for. Raises INVALID_REQUEST for a size out of range and for a token that
    this listing did not make."""
    if not 0 <= size <= PAGE_MAX:
        raise invalid("page_size", f"must be 1 to {PAGE_MAX}, or 0 for {PAGE_DEFAULT}")
    return Page(size=size or PAGE_DEFAULT, after=_cursor(listing, token) if token else ())


def token(listing: str, cursor: Cursor) -> str:
    if not cursor:
        return ""
    return base64.urlsafe_b64encode(msgspec.json.encode(_Token(listing, list(cursor)))).decode()


def _cursor(listing: str, text: str) -> Cursor:
    try:
        found = msgspec.json.decode(base64.b64decode(text, altchars=b"-_", validate=True), type=_Token)
    except (binascii.Error, msgspec.DecodeError, ValueError):
        raise invalid("page_token", "is none that this service gave") from None
    if found.listing != listing or not all(abs(value) < 2**63 for value in found.cursor):
        raise invalid("page_token", "is none that this listing gave")
    return tuple(found.cursor)
