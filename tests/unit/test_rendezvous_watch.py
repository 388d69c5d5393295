"""When the launcher looks at the rendezvous of a job; real jobs show what follows."""

from __future__ import annotations

from dtrain.environments.topology import Task
from dtrain.launch.supervision.rendezvous_watch import RendezvousWatch
from dtrain.task.task_messages import RendezvousNote
from given_clock import GivenClock

WORKERS = [Task("worker", 0), Task("worker", 1)]


def test_a_check_falls_due_and_finds_the_task_that_has_ended() -> None:
    clock = GivenClock()
    watch = RendezvousWatch(clock=clock)
    assert watch.next_check() is None
    watch.note(RendezvousNote(WORKERS[0], over=False))
    assert watch.check(WORKERS, lambda task: None).action == "go on"
    due = watch.next_check()
    clock.pass_by(1.0)
    assert due == watch.next_check() == clock.now()
    watch.ended(WORKERS[1], 0)
    decision = watch.check(WORKERS, lambda task: None)
    assert (decision.action, decision.task) == ("kill", WORKERS[1])
