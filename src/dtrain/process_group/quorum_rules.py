"""The rules of a job with a quorum: who takes part in a round, when it ends, and what comes too late.

They know numbers of workers and a clock: no process, no connection and no weights.
"""

from __future__ import annotations

from collections.abc import Iterable

from dtrain.base.clock import REAL, Clock

GRACE = 5.0
"""The least seconds for which a round that has its quorum waits for the rest of its members."""

_FRESH_GRACE = 1.0  # the least seconds that a worker in its first round is waited for

START_GRACE = 300.0
"""The seconds for which a `fit` whose quorum is there waits for the other workers that still run."""


class QuorumRules:
    """The members of a job, and its rounds.

    A worker joins, and becomes a member with the state of a round. A round ends when all members have
    contributed, or when `quorum` contributions are in and the grace is over: at least `grace` seconds, and at
    least as long as the round took until then. A member that has not contributed by then is behind: its
    contribution will be late, and it joins again.

    A process that has just joined still traces and compiles its step in its first round. So that round waits
    for it only half as long as it took for the others; if it is late then, it is waited for as the others are
    when it has joined again.

    Args:
        size: the number of workers.
        quorum: the fewest contributions of a round.
        grace: the least seconds of grace.
        clock: the clock of all limits.

    Attributes:
        fit: the number of the `fit` that runs, from 0.
        round: the number of its present round.
        members: the workers that have the state of the present round.
        joining: the workers that wait for a state.
        absent: the workers that will not come again.
        came: the members that have contributed to the present round.
        giver: the member that was asked for its state; None if none was.
        over: whether the `fit` has ended.
    """

    def __init__(self, size: int, quorum: int, *, grace: float = GRACE, clock: Clock = REAL) -> None:
        self._size, self._quorum, self._grace, self._clock = size, quorum, grace, clock
        self.fit = 0
        self.absent: set[int] = set()
        self._failed: set[int] = set()  # the workers that were lost, and have not joined since
        self._reset()

    def _reset(self) -> None:
        self.round = 0
        self.members: set[int] = set()
        self.joining: set[int] = set()
        self.came: set[int] = set()
        self.giver: int | None = None
        self.over = False
        self._fresh: set[int] = set()  # the members that have joined in the present round
        self._late: set[int] = set()  # the workers that were behind in their first round
        self._needs_quorum = True
        self._begun = self._clock.now()
        self._enough_at: float | None = None  # since when the round, or the beginning, has its quorum

    @property
    def fewest(self) -> int:
        """The fewest contributions of a round now: workers that will not come again are not waited for."""
        return max(1, min(self._quorum, self._size - len(self.absent)))

    def join(self, worker: int, fit: int) -> bool:
        """A worker wants to take part in a `fit`; returns False if this one is over."""
        if fit > self.fit:
            self.fit = fit
            self._reset()
        if fit < self.fit or self.over:
            return False
        self._remove([worker])
        self.joining.add(worker)
        self.absent.discard(worker)
        self._failed.discard(worker)
        return True

    def lose(self, worker: int, *, forever: bool = False) -> None:
        """A worker has ended; `forever` if it is not started again."""
        self._remove([worker])
        self._failed.add(worker)
        self._late.discard(worker)
        if forever:
            self.absent.add(worker)

    def beginner(self) -> int | None:
        """The worker whose state all take, where nobody trains: the first one, once all have joined.

        Those that were lost before are not waited for, if the others are enough.
        """
        if self.members or self.over or len(self.joining) < self.fewest:
            return None
        now = self._clock.now()
        self._enough_at = now if self._enough_at is None else self._enough_at
        awaited = {*range(self._size)} - self.absent - self._failed - self.joining
        if awaited and now < self._enough_at + START_GRACE:
            return None
        first = min(self.joining)
        self._enter([first])
        self.giver = first
        return first

    def give(self, worker: int, number: int) -> set[int] | None:
        """A member has given its state, that of the beginning of a round.

        Returns:
            The workers that become members with it; None if it is not the state of the present round.
        """
        if worker != self.giver:
            return None
        self.giver = None
        if self.members == {worker}:  # it may have resumed from a checkpoint
            self.round = number
        if number != self.round:
            return None
        joined = set(self.joining)
        if self.round:  # in the first round all trace
            self._fresh |= joined - self._late
        self._enter(joined)
        return joined

    def contribute(self, worker: int, fit: int, number: int, *, needs_quorum: bool = True) -> bool:
        """A worker contributes to a round; returns False if it is too late for that."""
        if fit != self.fit or number != self.round or worker not in self.members or self.over:
            return False
        self.came.add(worker)
        self._needs_quorum = needs_quorum
        return True

    def is_complete(self) -> bool:
        """Whether the present round ends now."""
        # Nobody joins within a round of logs, so it cannot wait for more than its members.
        needed = self.fewest if self._needs_quorum else min(self.fewest, len(self.members))
        if not self.came or len(self.came) < needed:
            self._enough_at = None
            return False
        now = self._clock.now()
        if self._enough_at is None:
            self._enough_at = now
        awaited, took = self.members - self.came, self._enough_at - self._begun
        return not awaited or now >= self._enough_at + (
            max(_FRESH_GRACE, took / 2) if awaited <= self._fresh else max(self._grace, took)
        )

    def end_round(self) -> set[int]:
        """Ends the present round; returns the members that are behind, and are members no more."""
        behind = self.members - self.came
        self._late = (self._late - self.came) | (behind & self._fresh)
        self._fresh = set()
        self._remove(behind)
        self.round += 1
        self.came = set()
        self._begun, self._enough_at = self._clock.now(), None
        return behind

    def ask(self, *, waiting: bool = False) -> int | None:
        """The member that must give its state to those that wait for one; None if nobody waits.

        Args:
            waiting: whether to ask within a round that lacks members: only if all there have contributed.
        """
        if not self.joining or not self.members or self.giver is not None:
            return None
        if waiting and not self.came >= self.members:
            return None
        self.giver = min(self.members)
        return self.giver

    def end_fit(self, fit: int) -> bool:
        """A member has ended the `fit`; returns whether it is the first one, so that its state counts."""
        first = fit == self.fit and not self.over
        self.over = self.over or fit == self.fit
        return first

    def _enter(self, workers: Iterable[int]) -> None:
        if not self.members:
            self._begun, self._enough_at = self._clock.now(), None
        entering = {*workers}
        self.joining -= entering
        self.members |= entering

    def _remove(self, workers: Iterable[int]) -> None:
        gone = {*workers}
        self.members -= gone
        self.joining -= gone
        self.came -= gone
        if self.giver in gone:
            self.giver = None
        if not self.members:
            self._enough_at = None
