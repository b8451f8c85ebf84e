"""What the protocol promises step by step, each promise a switch: a mutant is the protocol without one."""

from __future__ import annotations

from dataclasses import dataclass


class Unavailable(Exception):
    """No answer: the call may have happened or not."""


class Fenced(Exception):
    """Another turn owns the conversation."""


class Lost(Exception):
    """The hot store has less than the turn was told."""


class Busy(Exception):
    """Another turn holds the lock."""


class Known(Exception):
    """The message has a run already."""


REFUSED = (Fenced, Lost, Busy, Known)


@dataclass(frozen=True, slots=True)
class Rules:
    """The corrected protocol; every field is a property that a naive implementation lacks."""

    # Redis
    flush_compare: bool = True  # a script compares version and run before its first write
    compare_first: bool = True  # ... before, not after
    flush_sequence: bool = True  # a turn's flushes are numbered
    seen_seq: bool = True  # a store with less than the turn was told is STATE_LOST
    renew_identity: bool = True  # the same run renews once
    unlock_compare: bool = True  # a lock is deleted by its holder alone
    clean_compare: bool = True  # a member that changed since it was read stays dirty
    stamp_guard: bool = True  # recovery writes only while the stamp is what it saw
    # begin
    sql_claim: bool = True
    base_max: bool = True  # the next version is above SQL's fence
    renew_first: bool = True  # load after renew
    detect_stale: bool = True  # old hot data is dropped
    stale_after_claim: bool = True
    data_stamp: bool = True  # staleness by the data's own stamp, not by the version
    stamp_seq: bool = True  # ... and by its sequence
    drain_at_begin: bool = True  # what a dead turn flushed and prepared goes to SQL first
    stale_rechecked: bool = True  # ... on the data that the turn will start from, too
    begin_once: bool = True  # a begin that is late mends nothing once its turn has flushed
    ends_fenced: bool = True  # only the newest turn ends the runs of others
    union: bool = True  # messages and calls that only SQL has come back
    union_all: bool = True  # ... also those of the version that SQL has in part
    open_calls: bool = True  # a call that is open in Redis is looked up, however old it is
    normalise_always: bool = True  # by state, not by a flag
    s1_fenced: bool = True
    # write tools
    s2_sql: bool = True
    s2_fenced: bool = True
    s2_dedupe: bool = True  # SQL's live key bars a second registration
    lease_check: bool = True  # immediately before the call
    quarantine: bool = True  # "not effective" is believed only after time limit and lease
    unknown_blocks: bool = True
    settled_wins: bool = True
    # the end
    persist_cas: bool = True
    persist_in_order: bool = True  # an older batch never overwrites a newer one
    commit_retried: bool = True  # an unknown outcome is tried again, not read off another turn's row
    commit_token: bool = True  # turn_commit is asked before a turn is called fenced
    prepared_is_pending: bool = True  # ... and so is the outbox
    first_end_counts: bool = True  # a run that was given up or interrupted gets no turn_commit row
    values_checked: bool = True  # a drain's second read is not older than its first
    abandon_unstamped: bool = True  # giving up makes old data look no newer
    close_unstamped: bool = True  # cleaning up makes what is not merged yet look no newer
    own_end_checked: bool = True  # PERSISTED is answered for a drain that held this turn's end
    # the world
    tool_dedupes: bool = True  # the tool honours the idempotency key
    pause_before_call: bool = True  # a process may stop between the lease check and the call


CORRECT = Rules()
