"""Large fields of a node's space (state document 5.10): the value goes to SQL, Redis holds a pointer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping

import msgspec

from turnfence import records as r
from turnfence.records import to_json

KIND = "SPACE_SPILL"


class Spilled(msgspec.Struct, frozen=True):
    """One value that goes to ``task_node_payload`` (OUTPUT)."""

    payload_id: str
    data: str


class Placeholder(msgspec.Struct, frozen=True, rename="camel"):
    """What stands in the space instead of the value."""

    kind: str
    payload_id: str


def placeholder_of(value_json: str) -> str | None:
    """The payload id if a stored value is a placeholder, else None."""
    if KIND not in value_json:
        return None
    try:
        found = msgspec.json.decode(value_json, type=Placeholder)
    except msgspec.MsgspecError:
        return None
    return found.payload_id if found.kind == KIND else None


def spill(
    changes: Iterable[r.StateChange], max_bytes: int, run_id: str, sequence: int
) -> tuple[list[r.StateChange], list[Spilled]]:
    """Changes with oversized space fields replaced, and what was taken out. The payload id follows
    from run, flush and field, so that a repeat writes the same row."""
    kept: list[r.StateChange] = []
    out: list[Spilled] = []
    for change in changes:
        if not isinstance(change, r.PutNodeSpace):
            kept.append(change)
            continue

        def pointer(part: str, name: str, data: str, change: r.PutNodeSpace = change) -> str:
            seed = f"{run_id}:{sequence}:{change.task_id}:{change.node_id}:{part}:{name}"
            payload_id = hashlib.sha256(seed.encode()).hexdigest()[:32]
            out.append(Spilled(payload_id=payload_id, data=data))
            return to_json(Placeholder(kind=KIND, payload_id=payload_id))

        kept.append(
            msgspec.structs.replace(
                change,
                inputs=_sourced("inputs", change.inputs, max_bytes, pointer),
                outputs=_sourced("outputs", change.outputs, max_bytes, pointer),
                state={
                    name: pointer("state", name, value) if _large(value, max_bytes) else value
                    for name, value in change.state.items()
                },
            )
        )
    return kept, out


def _sourced(
    part: str,
    values: Mapping[str, r.Sourced],
    max_bytes: int,
    pointer: Callable[[str, str, str], str],
) -> dict[str, r.Sourced]:
    return {
        name: msgspec.structs.replace(value, value_json=pointer(part, name, value.value_json))
        if _large(value.value_json, max_bytes)
        else value
        for name, value in values.items()
    }


def _large(text: str, max_bytes: int) -> bool:
    return len(text) > max_bytes or len(text.encode()) > max_bytes
