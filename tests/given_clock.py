"""A clock that a test moves: time passes when something sleeps on it, or when the test says so."""

from __future__ import annotations

from dtrain.base.clock import Clock


class GivenClock(Clock):
    """A clock that stands still until it is moved.

    Args:
        at: the time in seconds that it shows first.
    """

    def __init__(self, at: float = 1000.0) -> None:
        self.at = at

    def now(self) -> float:
        """The time that the test has set."""
        return self.at

    def unix(self) -> float:
        """The same time: it begins with the clock."""
        return self.at

    def sleep(self, seconds: float) -> None:
        """Moves the clock instead of waiting."""
        self.pass_by(seconds)

    def pass_by(self, seconds: float) -> None:
        """Moves the clock on by some seconds."""
        if seconds < 0:
            raise ValueError(f"time does not run backwards: {seconds:g} s")
        self.at += seconds
