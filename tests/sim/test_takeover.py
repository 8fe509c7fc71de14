"""Any history in which leaders change at any moment: each goes on from the record, and nobody can tell but by waiting.

The histories and their judge are those of test_invariants.py. To hunt longer: HUNT=5000, as there.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis.stateful import invariant, precondition, rule
from msgspec.structs import replace

from rendezvousd.core.codec import LATER_S, Record, dump, load
from rendezvousd.core.events import TimePassed
from tests.sim.test_invariants import HUNT, AnyHistory


class AnyTakeover(AnyHistory):
    def __init__(self) -> None:
        super().__init__()
        self.record: Record | None = None
        self.terms = 0

    @invariant()
    def the_record_is_made_of_what_changed(self) -> None:
        """What was kept of the record before is what would be made anew."""
        job = self.stage.job_or_none
        if job is None:
            return
        self.record, whole = dump(job, self.record), dump(job)
        assert (self.record.head, self.record.parts) == (whole.head, whole.parts)

    @precondition(lambda self: self.stage.job_or_none is not None)
    @rule()
    def another_leads(self) -> None:
        stage = self.stage
        record = dump(stage.job)
        self.terms += 1
        self.record = None
        stage.job_or_none = load(record.head, record.parts, seed=f"term {self.terms}", now=stage.now)
        self._tell_the_ledger()
        stage.apply(TimePassed())
        stage.now += 2 * LATER_S  # nobody is heard in the same instant

    def _tell_the_ledger(self) -> None:
        """The judge goes on with what a new leader can know, too."""
        ledger, now = self.stage.ledger, self.stage.now
        for uid, word in ledger.words.items():
            ledger.words[uid] = replace(word, offer=None)
        job = self.stage.job
        gone_s = job.lease_s + job.spec.timing.kill_s
        # Whoever must be gone by now is nobody's concern any more.
        ledger.unheard = {uid: now for uid, at in ledger.unheard.items() if now <= at + gone_s}
        book = ledger.book
        if book is None:
            return
        earliest = min((e.at for e in book.evidence), default=0.0)
        for evidence in book.evidence:
            evidence.at = now + LATER_S + (evidence.at - earliest)


AnyTakeover.TestCase.settings = settings(AnyHistory.TestCase.settings, max_examples=HUNT or 60)
TestAnyTakeover = AnyTakeover.TestCase
