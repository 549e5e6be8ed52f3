"""What an engine has told of its prompts, until it goes to the node: with some later call, a second apart at least.

Nobody waits for it and nothing is sent twice. What finds no room here is dropped, the oldest first, and so is what is
on its way when the node goes. Thread-safe by the client's lock, which is held around all but `is_due`.
"""

from __future__ import annotations

from collections import deque

from tierkv.client.groups import GroupRecord
from tierkv.client.session import Session
from tierkv.core.prefill_rates import PrefillSample
from tierkv.wire.messages import MAX_PREFILL_SAMPLES, ReportPrefill

EVERY_SECONDS = 1.0
MOST_WAITING = 4 * MAX_PREFILL_SAMPLES
MOST_UNANSWERED = 16


class PrefillReports:
    def __init__(self) -> None:
        self._waiting: deque[tuple[GroupRecord, PrefillSample]] = deque(maxlen=MOST_WAITING)
        self._unanswered: deque[int] = deque(maxlen=MOST_UNANSWERED)
        self._next = float("-inf")

    def add(self, group: GroupRecord, sample: PrefillSample) -> None:
        self._waiting.append((group, sample))

    def is_due(self, now: float) -> bool:
        """May be asked without the lock: a wrong answer costs a look, or a call."""
        return bool(self._waiting) and now >= self._next

    def take(self, session: Session, request_id: int, now: float) -> ReportPrefill | None:
        """A report on the group of the oldest sample, if the session can make one now. A tenant that is not trusted has
        none to make: the node would not believe it."""
        if session.tenant:
            self._waiting.clear()
        opened = [group for group, _ in self._waiting if group.key in session.opened]
        if not opened or now < self._next:
            return None
        samples = [sample for group, sample in self._waiting if group is opened[0]][-MAX_PREFILL_SAMPLES:]
        kept = [(group, sample) for group, sample in self._waiting if group is not opened[0]]
        self._waiting.clear()
        self._waiting.extend(kept)
        self._next = now + EVERY_SECONDS
        self._unanswered.append(request_id)
        return ReportPrefill(id=request_id, session=session.token, group=opened[0].key, samples=tuple(samples))

    def answered(self, request_id: int) -> bool:
        """Whether that was an answer to one of these: whatever it says, there is nothing to do."""
        if request_id not in self._unanswered:
            return False
        self._unanswered.remove(request_id)
        return True
