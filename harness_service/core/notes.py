"""Reserved names in a node's notes (state document 3.3, NodeNoteKey): the model cannot set them."""

from __future__ import annotations

AWAITING = "awaiting"  # the delegate that the node waits for
DELEGATE_RESULT = "delegateResult"  # what a failed delegate left, shown to the model once
ENTITY_OUTPUTS = "entityOutputs"  # entity candidates among the node's outputs
COLLECTION = "collection"  # how far the collection of evidence has come
FACT_PREFIX = "fact:"  # + evidence id: one learned fact

_RESERVED = frozenset({AWAITING, DELEGATE_RESULT, ENTITY_OUTPUTS, COLLECTION})


def is_reserved(name: str) -> bool:
    """Whether ``builtin_state_set`` must refuse the name."""
    return name in _RESERVED or name.startswith(FACT_PREFIX)
