"""Operations of several workers: unequal ones raise on every worker, also on those that wait elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from dtrain.errors import OperationMismatchError, PeerMissingError
from dtrain.process_group.peers import Peers
from in_threads import SECONDS, start_in_threads
from peer_jobs import PeerJob
from processes import wait_until

CHIEF = ": is one of them behind is_chief()?"


class Job(PeerJob):
    """Several connected workers in this process, on one given clock."""

    def run(self, works: dict[int, Callable[[Peers], Any]]) -> dict[int, Any]:
        """What each of these workers gets of its work; an exception where it raised one."""
        return start_in_threads(
            {number: partial(work, self.workers[number]) for number, work in works.items()}
        )()


@pytest.fixture
def job() -> Iterator[Callable[[int], Job]]:
    made: list[Job] = []

    def make(size: int) -> Job:
        made.append(Job(size))
        return made[-1]

    yield make
    for each in made:
        for worker in each.workers:
            worker.close()


def exchanges(operation: str) -> Callable[[Peers], Any]:
    return lambda worker: worker.all_gather(b"", operation=operation)


def until_told(worker: Peers) -> None:
    """Waits as a step does, whose transport checks the peers again and again."""
    stop = threading.Event()
    while not stop.wait(0.01):
        worker.check()


def messages(found: dict[int, Any], kind: type[Exception] = OperationMismatchError) -> set[str]:
    assert all(isinstance(error, kind) for error in found.values()), found
    return {error.message for error in found.values()}


@pytest.mark.parametrize("different", [0, 1, 2])
def test_different_exchanges_raise_on_every_worker(job: Callable[[int], Job], different: int) -> None:
    texts = ["is in fit (epoch 3)"] * 3
    texts[different] = "is in evaluate"
    (message,) = messages(job(3).run({worker: exchanges(text) for worker, text in enumerate(texts)}))
    assert f"worker {different} " in message and "in evaluate" in message and "in fit (epoch 3)" in message
    assert message.endswith(CHIEF)


def test_two_of_the_same_operation_name_what_they_exchange(job: Callable[[int], Job]) -> None:
    found = job(2).run({0: exchanges("is in fit\nlogs"), 1: exchanges("is in fit\nhooks")})
    (message,) = messages(found)
    assert "worker 0 is in fit, at logs, worker 1 in fit, at hooks" in message


@pytest.mark.parametrize("finds", [0, 1])
def test_two_that_exchange_different_values_at_the_same_point(job: Callable[[int], Job], finds: int) -> None:
    """One worker's transport is at a call of an operation that no worker has named."""
    here = job(2)
    for worker in here.workers:
        worker.begin("is in fit\nlogs")
    first = here.workers[0]._operations
    wait_until(lambda: first._reached == [1, 1])
    first._reached[1 - finds] += 1  # which this worker's transport has seen, but not what it is
    (message,) = messages(here.run({finds: Peers.explain_difference, 1 - finds: until_told}))
    assert "workers 0 and 1 are in fit, at logs, but one exchanges what the others do not" in message


@pytest.mark.parametrize("waiting", [0, 1])
def test_a_worker_that_waits_in_a_step_is_told_at_once(job: Callable[[int], Job], waiting: int) -> None:
    here = job(2)

    def step(worker: Peers) -> None:
        worker.begin("is in fit (epoch 1)")
        until_told(worker)

    (message,) = messages(here.run({waiting: step, 1 - waiting: exchanges("is in evaluate")}))
    assert f"worker {waiting} " in message and message.endswith(CHIEF)


@pytest.mark.parametrize("waiting", [0, 1])
def test_a_worker_that_waits_for_one_at_a_later_operation(job: Callable[[int], Job], waiting: int) -> None:
    """The other worker will never join the step; what it has sent may arrive for five seconds."""
    here = one_goes_on(job(2), waiting)
    here.workers[waiting].check()
    here.clock.pass_by(4.9)
    here.workers[waiting].check()
    here.clock.pass_by(0.2)
    says_that_it_waits(here, waiting)
    here.clock.pass_by(0.9)
    here.workers[waiting].check()
    here.clock.pass_by(0.2)
    (message,) = messages(here.run({0: until_told, 1: until_told}))
    assert f"worker {1 - waiting} " in message and "in evaluate" in message


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_worker_that_was_stopped_at_the_end_of_its_wait(job: Callable[[int], Job], stopped: int) -> None:
    """When it goes on, it says that it waits before it sees that the others' values have come."""
    here = one_goes_on(job(2), stopped)
    here.clock.pass_by(60.0)
    says_that_it_waits(here, stopped)
    here.workers[stopped].begin("is in evaluate")
    here.workers[1 - stopped].begin("is in predict")
    wait_until(lambda: here.workers[0]._operations._reached[1 - stopped] == 3)
    here.clock.pass_by(60.0)
    says_that_it_waits(here, stopped)  # it was stopped once more
    here.workers[stopped].begin("is in predict")
    assert here.run({0: exchanges("is in fit"), 1: exchanges("is in fit")}) == {0: [b"", b""], 1: [b"", b""]}


def one_goes_on(here: Job, waiting: int) -> Job:
    """A job of two workers of which one still waits in a step while the other is at a later operation."""
    for worker in here.workers:
        worker.begin("is in fit (epoch 1)")
    here.workers[1 - waiting].begin("is in evaluate")
    wait_until(lambda: here.workers[0]._operations._reached[1 - waiting] == 2)
    return here


def says_that_it_waits(here: Job, worker: int) -> None:
    """A worker says that it waits; returns when the first worker suspects that it waits in vain."""
    here.workers[worker].check()
    wait_until(lambda: worker in here.workers[0]._operations._in_vain)


def test_a_worker_that_waits_while_all_are_at_its_operation(job: Callable[[int], Job]) -> None:
    here = job(2)
    for worker in here.workers:
        worker.begin("is in fit (epoch 1)")
    wait_until(lambda: here.workers[0]._operations._reached == [1, 1])
    for _ in range(5):
        here.clock.pass_by(60.0)
        here.workers[0].check()
        here.workers[1].check()
    assert here.run({0: exchanges("is in fit"), 1: exchanges("is in fit")}) == {0: [b"", b""], 1: [b"", b""]}


@pytest.mark.parametrize("ended", [0, 1])
def test_a_worker_that_has_ended_its_program(job: Callable[[int], Job], ended: int) -> None:
    found = job(2).run({ended: Peers.leave, 1 - ended: exchanges("is in fit")})
    (message,) = messages({1 - ended: found[1 - ended]})
    assert f"worker {ended} has ended its program" in message and "in fit" in message
    assert "is_chief" not in message


def test_workers_that_end_one_after_the_other(job: Callable[[int], Job]) -> None:
    here = job(3)

    def work(worker: Peers) -> None:
        worker.all_gather(b"", operation="is in fit")
        worker.leave()
        worker.check()

    assert here.run(dict.fromkeys(range(3), work)) == dict.fromkeys(range(3))


@pytest.mark.parametrize("fails", [0, 1])
def test_a_program_that_an_error_has_ended_is_a_loss_inside_a_step(
    job: Callable[[int], Job], fails: int
) -> None:
    """The end of the program, which follows at once, does not hide the error."""
    here = job(2)
    for worker in here.workers:
        worker.begin("is in fit")
    for text in ("has left fit because of an error", "has ended its program"):
        here.workers[fails].begin(text)
    wait_until(lambda: here.workers[0]._operations._reached[fails] == 3)
    here.clock.pass_by(5.1)
    says_that_it_waits(here, 1 - fails)
    here.clock.pass_by(1.1)
    (message,) = messages(here.run({1 - fails: until_told}), PeerMissingError)
    assert (
        f"worker {fails} has left fit because of an error" in message and "ended its program" not in message
    )


def test_an_operation_that_an_error_has_ended_is_a_loss(job: Callable[[int], Job]) -> None:
    """The launcher blames the worker with the error, not those that waited for it."""

    def fails(worker: Peers) -> None:
        worker.begin("is in fit")
        worker.begin("has left fit because of an error")

    def goes_on(worker: Peers) -> None:
        worker.begin("is in fit")
        worker.all_gather(b"", operation="is in fit")

    found = job(2).run({0: goes_on, 1: fails})
    (message,) = messages({0: found[0]}, PeerMissingError)
    assert "worker 1 has left fit because of an error" in message


# --- agreeing on the last call of a loop


def calls_of(job: Job, wants: dict[int, int]) -> dict[int, int]:
    """How many calls each worker makes; `wants` says after which of them a worker wants to stop."""

    together = threading.Barrier(len(job.workers), timeout=SECONDS)

    def work(worker: Peers) -> int:
        loop = worker.begin("is in fit")
        worker.open_loop(loop)
        made = 0
        while worker.begin_call(loop):
            together.wait()  # as the collectives of a step
            made += 1
            if made == wants.get(worker.rank):
                worker.stop(loop)
        worker.all_gather(b"", operation="is in fit")
        worker.close_loop(loop)
        return made

    return job.run(dict.fromkeys(range(len(job.workers)), work))


@pytest.mark.parametrize("one", [0, 1, 2])
def test_one_worker_that_wants_to_stop_stops_all_after_one_call(job: Callable[[int], Job], one: int) -> None:
    found = calls_of(job(3), {one: 4})
    assert len({*found.values()}) == 1 and found[0] in (4, 5), found


def test_workers_that_want_to_stop_after_the_same_call_stop_there(job: Callable[[int], Job]) -> None:
    here = job(3)
    for _ in range(5):
        assert calls_of(here, {0: 3, 1: 3, 2: 3}) == {0: 3, 1: 3, 2: 3}


def test_workers_that_want_to_stop_after_different_calls(job: Callable[[int], Job]) -> None:
    found = calls_of(job(3), {0: 3, 1: 4, 2: 6})
    assert len({*found.values()}) == 1 and found[0] in (3, 4), found
