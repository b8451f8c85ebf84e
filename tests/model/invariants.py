"""What must hold (I1–I17): noted where it happens, checked after every step, and once more at the end.

The witness sees both stores whole, which no process does; nothing in the protocol reads it.
"""

from __future__ import annotations

from tests.model.redis import BARS, OPEN, Call, Hot, Ref
from tests.model.rules import Rules
from tests.model.sql import Sql


class Witness:
    """What really happened, and which promise it broke."""

    def __init__(self, rules: Rules, sql: Sql) -> None:
        self.rules = rules
        self.sql = sql
        self.hot = Hot()
        self.violations: dict[str, str] = {}
        self.losses = 0  # how often Redis lost data: what was only there may be gone
        self.top = 0  # the newest version that has claimed
        self.begun: set[str] = set()
        self.blind: dict[str, str] = {}  # runs whose view lacks what SQL had
        self.ends: dict[str, tuple[str, int]] = {}  # run → what the caller was told, and the losses then
        self.told: dict[str, int] = {}
        self.effects: dict[str, int] = {}
        self.verdicts: dict[str, int] = {}
        self.nodes: dict[str, str] = {}  # run → how it leaves its node
        self.approved: dict[str, int] = {}
        self.flushed: set[tuple[str, int, int]] = set()
        self.high = (0, 0)
        # Redis went back, and a turn that SQL knows to be over wrote to it: data with that turn's stamp may
        # lack what the stamp stands for. No stamp can see this; the views of such a history prove nothing.
        self.laundered = False

    def broken(self, number: str, what: str) -> None:
        self.violations.setdefault(number, what)

    # --- Redis ------------------------------------------------------------------------------------

    def note_redis_write(self, ref: Ref) -> None:
        if ref.version < self.top:
            self.laundered = True
        if self.hot.version != ref.version or self.hot.owner != ref.run:
            self.broken("I2r", f"{ref.run} wrote Redis at version {ref.version}, not {self.hot.version}")

    def note_flush(self, ref: Ref, sequence: int) -> None:
        applied = (ref.run, sequence, self.losses)
        if applied in self.flushed:
            self.broken("I9", f"flush {sequence} of {ref.run} was applied twice")
        self.flushed.add(applied)

    def note_unlock(self, ref: Ref, lock: tuple[str, str] | None) -> None:
        if lock is not None and lock[0] != ref.run:
            self.broken("I8", f"{ref.run} released the lock of {lock[0]}")

    # --- begin ------------------------------------------------------------------------------------

    def note_begin(self, run: str, prev: str) -> None:
        if prev == run:
            self.broken("I9", f"{run} is told that it is its own interrupted predecessor")

    def note_claim(self, ref: Ref) -> None:
        self.top = max(self.top, ref.version)

    def note_view(self, ref: Ref, h: Hot) -> str:
        """What the turn starts from: everything that SQL has, and nothing half done."""
        lacks = ""
        for message in self.sql.messages:
            if message not in h.messages:
                lacks = message
        for evidence, call in self.sql.calls.items():
            known = h.calls.get(evidence)
            if known is None or (known.status in OPEN and call.status not in OPEN):
                lacks = evidence
        if h.checkpoint in self.sql.gone:
            lacks = h.checkpoint
        for evidence, call in h.calls.items():
            if call.status == "STARTED" and call.run != ref.run:
                self.broken("I7", f"{evidence} is still STARTED after {ref.run} began")
        if h.node == "RUNNING":
            self.broken("I7", f"the node is still RUNNING after {ref.run} began")
        return lacks

    def note_begun(self, run: str, lacks: str) -> None:
        self.begun.add(run)
        if lacks:
            self.blind[run] = lacks

    # --- SQL --------------------------------------------------------------------------------------

    def note_sql_write(self, ref: Ref) -> None:
        if ref.version < self.top:
            self.broken("I2s", f"{ref.run} wrote SQL at version {ref.version} after {self.top} had claimed")

    def note_persist(self, ref: Ref) -> None:
        self.note_sql_write(ref)
        self._sees("persisted", ref.run)

    def note_registration(self, ref: Ref, key: str) -> None:
        if any(call.key == key and call.status in BARS for call in self.sql.calls.values()):
            self.broken("I15", f"{ref.run} registers {key} again")

    def note_call(self, evidence: str, known: Call | None, call: Call) -> None:
        if known is not None and known.status not in OPEN and call.status in OPEN:
            self.broken("I15", f"{evidence} was {known.status} and is {call.status} again")

    def note_interrupt(self, ref: Ref, runs: list[str]) -> None:
        for run in runs:
            state, version = self.sql.runs[run]
            if state == "RUNNING" and version >= ref.version:
                self.broken("I9", f"{ref.run} interrupts {run}, which began after it")

    def note_commit(self, run: str, version: int) -> None:
        """The turn_commit row of ``run`` is about to be written (again)."""
        if self.sql.runs.get(run, ("", 0))[0] != "DONE":
            self.broken("I14", f"{run} is committed but its row says {self.sql.runs.get(run)}")
        if any(v == version and r != run for r, v in self.sql.commits.items()):
            self.broken("I3", f"two turns are committed at version {version}")
        if self.ends.get(run) in (("FENCED", self.losses), ("LOST", self.losses)):
            self.broken("I5", f"{run} was reported STATE_FENCED and is committed later")

    # --- the harness ------------------------------------------------------------------------------

    def note_end(self, run: str, end: str, losses: int = -1) -> None:
        """``losses``: those before the turn, unless there was no turn."""
        self.ends[run] = (end, self.losses if losses < 0 else losses)
        committed = run in self.sql.commits
        if end == "PERSISTED":
            if not committed:
                self.broken("I5", f"{run} is PERSISTED without a turn_commit row")
            self._is_whole(run, lost=self.ends[run][1] != self.losses)
        elif end in ("FENCED", "LOST") and committed and losses == self.losses:
            self.broken("I5", f"{run} is committed and reported {end}")

    def _is_whole(self, run: str, *, lost: bool) -> None:
        if self.sql.node != self.nodes.get(run) and self.sql.runs[run][1] == self.top:
            self.broken("I10", f"{run} is PERSISTED and its node is {self.sql.node}")
        messages = (f"{run}.progress", f"{run}.reply")
        if any(message not in self.sql.messages for message in messages):
            self.broken("I10", f"{run} is PERSISTED without its messages")
        for evidence, call in self.sql.calls.items():
            if call.run == run and call.status == "STARTED" and not lost:
                self.broken("I10", f"{run} is PERSISTED and {evidence} is still STARTED")

    def note_told(self, message: str, losses: int) -> None:
        self.told[message] = losses

    def note_delivery(self, run: str, evidence: str, key: str, approval: str) -> None:
        if approval:
            self.approved[approval] = self.approved.get(approval, 0) + 1
            if self.approved[approval] > 1 + self.verdicts.get(key, 0):
                self.broken("I13", f"{approval} allowed two calls")
        if evidence not in self.sql.calls:
            self.broken("I6", f"{evidence} is called without a row in SQL")
        self._sees("called a tool", run)

    def note_effect(self, key: str) -> None:
        self.effects[key] = self.effects.get(key, 0) + 1
        pauses = self.rules.pause_before_call and not self.rules.tool_dedupes
        allowed = 1 + (self.verdicts.get(key, 0) if pauses else 0)
        if self.effects[key] > allowed:
            self.broken("I1", f"{key} has taken effect {self.effects[key]} times")

    def _sees(self, what: str, run: str) -> None:
        if run in self.blind and not self.laundered:
            self.broken("I4", f"{run} {what} on a view without {self.blind[run]}")

    # --- after every step, and at the end ---------------------------------------------------------

    def check(self) -> None:
        fence, sv = self.sql.fence, self.sql.sv
        if (fence, sv) == self.high:
            return
        if fence < self.high[0] or sv < self.high[1]:
            self.broken("I3", f"fence and state version fell from {self.high} to {(fence, sv)}")
        if sv > fence and self.rules.sql_claim:
            self.broken("I3", f"state version {sv} is above the fence {fence}")
        self.high = (fence, sv)

    def check_quiet(self, last: str) -> None:
        """No fault any more, and one fresh turn has run."""
        h, s = self.hot, self.sql
        if self.ends.get(last, ("", 0))[0] != "PERSISTED":
            self.broken("I17", f"the turn after the faults ended {self.ends.get(last)}")
            return
        for message, losses in self.told.items():
            if losses == self.losses and message not in s.messages:
                self.broken("I11", f"{message} was shown and never reached SQL")
        for run, (end, losses) in self.ends.items():
            promised = end == "PERSISTED" or (end == "PENDING" and losses == self.losses)
            if promised and run not in s.commits:
                self.broken("I10", f"{run} was told {end} and has no turn_commit row")
        if any(state == "RUNNING" for state, _ in s.runs.values()):
            self.broken("I14", "a run is RUNNING for ever")
        if not self.laundered:
            self._check_equal(h, s)

    def _check_equal(self, h: Hot, s: Sql) -> None:
        if h.dirty or h.outbox:
            self.broken("I12", f"still dirty: {sorted(h.dirty)}")
        if h.messages.keys() != s.messages.keys():
            self.broken("I12", f"messages differ: {sorted(h.messages.keys() ^ s.messages.keys())}")
        if h.calls != s.calls:
            differ = {e: (h.calls.get(e), s.calls.get(e)) for e in h.calls.keys() | s.calls.keys()}
            self.broken("I12", f"calls differ: { {e: p for e, p in differ.items() if p[0] != p[1]} }")
        if h.node != s.node:
            self.broken("I12", f"the node is {h.node} in Redis and {s.node} in SQL")
        if h.checkpoint != s.checkpoint:
            self.broken("I12", f"the checkpoint is {h.checkpoint!r} in Redis and {s.checkpoint!r} in SQL")
