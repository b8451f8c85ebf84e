"""The scripts of ``lua/``, and operations as the flat arguments that they take."""

from __future__ import annotations

import hashlib
import importlib.resources
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby

import msgspec

from state_service.ports import Op, OpName

FIELDS_AT_ONCE = 500  # well below what Lua's unpack takes

Argument = str | int


class Script(msgspec.Struct, frozen=True):
    """The text of a script and the name that the server knows it by."""

    text: str
    sha: str


def _script(*parts: str) -> Script:
    folder = importlib.resources.files("state_service.adapters") / "lua"
    text = "".join((folder / f"{part}.lua").read_text(encoding="utf-8") for part in parts)
    return Script(text=text, sha=hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


RENEW = _script("ops", "renew")
UNDO = _script("ops", "undo")
FLUSH = _script("ops", "flush")
REGISTER = _script("ops", "register")
ABANDON = _script("ops", "abandon")
LEASE = _script("lease")
CANCEL = _script("cancel")
BURY = _script("bury")
READ = _script("read")


# --- operations as arguments ----------------------------------------------------------------------

_ARGUMENTS: Mapping[OpName, Callable[[Op], tuple[Argument, ...]]] = {
    OpName.HDEL: lambda op: (op.field,),
    OpName.SET: lambda op: (op.value,),
    OpName.DEL: lambda op: (),
    OpName.UNLIST: lambda op: (),
    OpName.LPUSH_TRIM: lambda op: (op.value, op.number),
    OpName.JAPPEND: lambda op: (op.field, op.value),
    OpName.EXPIRE: lambda op: (op.number,),
    OpName.XADD: lambda op: (op.field, op.value),
    OpName.DIRTY: lambda op: (op.field,),
    OpName.OUTBOX: lambda op: (op.field, op.value),
    OpName.CLEAN: lambda op: (op.field, op.number),
    OpName.UNLOCK: lambda op: (),
}
_KEYLESS = frozenset({OpName.DIRTY, OpName.OUTBOX, OpName.CLEAN, OpName.UNLOCK})


class Encoded(msgspec.Struct, frozen=True):
    """Operations as a script takes them: all key suffixes, and flat arguments that point into them."""

    suffixes: tuple[str, ...]
    arguments: tuple[Argument, ...]


def encode_ops(ops: Sequence[Op], known: Sequence[str]) -> Encoded:
    """``known``: the key suffixes that come first in KEYS anyway. Neighbouring HSETs of one key become
    one, and all DIRTYs. Raises ValueError for operations that no server should ever see."""
    check_ops(ops)
    places = {suffix: place for place, suffix in enumerate(known, start=1)}
    arguments: list[Argument] = []
    count = 0
    for name, key, args in _merged(ops):
        place = 0 if name in _KEYLESS else places.setdefault(key, len(places) + 1)
        arguments += (name, place, len(args), *args)
        count += 1
    return Encoded(suffixes=tuple(places), arguments=(count, *arguments))


def check_ops(ops: Sequence[Op]) -> None:
    """Keys where they belong, and no field that one call both sets and appends to: the script checks a
    stored array before it writes anything."""
    for op in ops:
        if (op.op in _KEYLESS) != (op.key == ""):
            raise ValueError(f"{op.op} {'takes no' if op.key else 'needs a'} key")
    appended = {(op.key, op.field) for op in ops if op.op is OpName.JAPPEND}
    if appended and any((op.key, op.field) in appended for op in ops if op.op is OpName.HSET):
        raise ValueError("a field is both set and appended to")


def _merged(ops: Sequence[Op]) -> Iterator[tuple[OpName, str, tuple[Argument, ...]]]:
    marked: list[str] = []
    if all(op.op is not OpName.CLEAN for op in ops):  # else their order counts
        marked = list(dict.fromkeys(op.field for op in ops if op.op is OpName.DIRTY))
        ops = [op for op in ops if op.op is not OpName.DIRTY]
    for is_hset, run in groupby(ops, key=lambda op: op.op is OpName.HSET):
        if is_hset:
            yield from _merged_hsets(run)
        else:
            for op in run:
                yield op.op, op.key, _ARGUMENTS[op.op](op)
    for first in range(0, len(marked), FIELDS_AT_ONCE):
        yield OpName.DIRTY, "", tuple(marked[first : first + FIELDS_AT_ONCE])


def _merged_hsets(run: Iterable[Op]) -> Iterator[tuple[OpName, str, tuple[Argument, ...]]]:
    by_key: dict[str, list[Op]] = {}
    for op in run:
        by_key.setdefault(op.key, []).append(op)
    for key, sets in by_key.items():
        for first in range(0, len(sets), FIELDS_AT_ONCE):
            part = sets[first : first + FIELDS_AT_ONCE]
            yield OpName.HSET, key, tuple(text for op in part for text in (op.field, op.value))


def content_hash(ops: Sequence[Op]) -> str:
    """Identity of what a flush writes: equal for a repeat, whatever the time."""
    return hashlib.sha256(msgspec.json.encode(ops)).hexdigest()[:32]
