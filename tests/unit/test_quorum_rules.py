"""Who takes part in the rounds of a job with a quorum, and when a round ends, on a given clock."""

from __future__ import annotations

import pytest

from dtrain.process_group.quorum_report import QuorumReport
from dtrain.process_group.quorum_rules import START_GRACE, QuorumRules
from given_clock import GivenClock


@pytest.fixture
def clock() -> GivenClock:
    return GivenClock()


def begun(clock: GivenClock, size: int = 3, quorum: int = 2) -> QuorumRules:
    """The rules of a job in which all workers are members of the first round."""
    rules = QuorumRules(size, quorum, grace=5.0, clock=clock)
    for worker in range(size):
        assert rules.join(worker=worker, fit=0)
    assert rules.beginner() == 0
    assert rules.give(0, 0) == {*range(1, size)}
    return rules


def contributed(rules: QuorumRules, *workers: int) -> bool:
    for worker in workers:
        assert rules.contribute(worker, 0, rules.round)
    return rules.is_complete()


def test_all_are_waited_for_at_the_beginning_and_the_first_one_gives_its_state(clock: GivenClock) -> None:
    rules = QuorumRules(3, 2, clock=clock)
    rules.join(worker=2, fit=0)
    rules.join(worker=1, fit=0)
    assert rules.beginner() is None
    clock.pass_by(START_GRACE)
    assert rules.beginner() == 1  # the first worker did not come
    assert rules.beginner() is None
    rules.join(worker=0, fit=0)
    assert rules.give(1, 0) == {0, 2}
    assert rules.members == {0, 1, 2}


def test_a_worker_that_will_not_come_is_not_waited_for(clock: GivenClock) -> None:
    rules = QuorumRules(3, 2, clock=clock)
    rules.lose(0, forever=True)
    rules.join(worker=2, fit=0)
    rules.join(worker=1, fit=0)
    assert rules.beginner() == 1


def test_a_worker_that_is_lost_at_the_beginning_holds_nobody_up(clock: GivenClock) -> None:
    rules = QuorumRules(3, 2, clock=clock)
    rules.lose(0)
    rules.join(worker=2, fit=0)
    assert rules.beginner() is None  # no quorum
    rules.join(worker=1, fit=0)
    assert rules.beginner() == 1
    rules.join(worker=0, fit=0)
    assert rules.give(1, 0) == {0, 2}


def test_a_round_ends_when_all_members_have_come(clock: GivenClock) -> None:
    rules = begun(clock)
    assert not contributed(rules, 0, 1)
    assert contributed(rules, 2)
    assert rules.end_round() == set()
    assert (rules.round, rules.members, rules.came) == (1, {0, 1, 2}, set())


def test_a_lost_member_is_not_waited_for(clock: GivenClock) -> None:
    rules = begun(clock)
    assert not contributed(rules, 0, 1)
    rules.lose(2)
    assert rules.is_complete()


def test_a_slow_member_is_waited_for_as_long_as_the_round_has_taken(clock: GivenClock) -> None:
    rules = begun(clock)
    clock.pass_by(20)
    assert not contributed(rules, 0, 1)
    clock.pass_by(19)
    assert not rules.is_complete()
    clock.pass_by(1)
    assert rules.is_complete()
    assert rules.end_round() == {2}
    assert not rules.contribute(2, 0, 0)  # late
    assert not rules.contribute(2, 0, 1)  # it has not joined again
    assert not contributed(rules, 0)
    clock.pass_by(0)
    assert contributed(rules, 1)  # both members; the least grace is for members alone


def test_a_round_waits_for_its_quorum_and_takes_who_joins_within(clock: GivenClock) -> None:
    rules = begun(clock)
    rules.lose(1)
    rules.lose(2)
    assert not contributed(rules, 0)
    clock.pass_by(1000)
    assert not rules.is_complete()
    assert rules.ask(waiting=True) is None  # nobody wants the state
    rules.join(worker=2, fit=0)
    assert rules.ask(waiting=True) == 0
    assert rules.ask(waiting=True) is None  # it was asked
    assert rules.give(0, 0) == {2}
    assert contributed(rules, 2)


def test_with_too_few_left_for_the_quorum_the_rest_is_enough(clock: GivenClock) -> None:
    rules = begun(clock, quorum=3)
    rules.lose(1, forever=True)
    assert rules.fewest == 2
    assert contributed(rules, 0, 2)


def test_who_joins_gets_the_state_of_the_next_round(clock: GivenClock) -> None:
    rules = begun(clock)
    rules.lose(1)
    rules.join(worker=1, fit=0)
    assert rules.ask(waiting=True) is None  # the round goes on
    assert contributed(rules, 0, 2)
    rules.end_round()
    assert rules.ask() == 0
    assert rules.give(2, 1) is None  # it was not asked
    rules.lose(0)  # who was asked is lost: another one is, after the next round
    assert contributed(rules, 2) is False
    assert rules.ask(waiting=True) == 2
    assert rules.give(2, 1) == {1}


def test_the_first_round_of_a_worker_that_joins_waits_less_for_it(clock: GivenClock) -> None:
    rules = begun(clock)
    contributed(rules, 0, 1, 2)
    rules.end_round()
    rules.lose(2)
    for grace in (4, 8):  # it traces, and is late; then it is waited for as others are
        rules.join(worker=2, fit=0)
        contributed(rules, 0, 1)
        rules.end_round()
        assert rules.ask() == 0
        assert rules.give(0, rules.round) == {2}
        clock.pass_by(8)
        assert not contributed(rules, 0, 1)
        clock.pass_by(grace - 1)
        assert not rules.is_complete()
        clock.pass_by(1)
        assert rules.is_complete()
        assert rules.end_round() == {2}


def test_a_state_of_an_earlier_round_is_not_taken(clock: GivenClock) -> None:
    rules = begun(clock)
    rules.lose(2)
    rules.join(worker=2, fit=0)
    contributed(rules, 0, 1)
    rules.end_round()
    assert rules.ask() == 0
    rules.round = 5
    assert rules.give(0, 1) is None
    assert rules.joining == {2}


def test_when_all_were_lost_the_first_begins_anew(clock: GivenClock) -> None:
    rules = begun(clock)
    contributed(rules, 0, 1, 2)
    rules.end_round()
    for worker in range(3):
        rules.lose(worker)
    for worker in range(3):
        rules.join(worker=worker, fit=0)
    assert rules.beginner() == 0
    assert rules.give(0, 0) == {1, 2}  # from its checkpoint
    assert rules.round == 0


def test_who_comes_after_the_end_does_not_train(clock: GivenClock) -> None:
    rules = begun(clock)
    assert rules.end_fit(0)
    assert not rules.end_fit(0)
    assert not rules.join(worker=1, fit=0)
    assert not rules.contribute(2, 0, 0)
    assert rules.join(worker=1, fit=1)  # the next fit
    assert rules.fit == 1
    assert not rules.join(worker=2, fit=0)


def test_logs_need_no_more_than_the_members(clock: GivenClock) -> None:
    rules = begun(clock)
    rules.contribute(0, 0, 0, needs_quorum=False)
    clock.pass_by(100)
    assert not rules.is_complete()  # two of the three members
    rules.lose(1)
    rules.lose(2)
    rules.contribute(0, 0, 0, needs_quorum=False)
    assert rules.is_complete()


def test_the_report_accounts_for_every_contribution(clock: GivenClock) -> None:
    report = QuorumReport(4, 2, clock)
    report.count([10, 10, 10, 10], late=0)
    report.leaves(3)
    report.leaves(0)
    clock.pass_by(6)
    report.is_back(0)
    report.count([10, 10], late=1)
    clock.pass_by(2)
    report.settle()
    assert (report.contributions, report.missed, report.late) == (6, 1, 1)
    assert (report.examples, report.missed_examples, report.late_examples) == (60, 10, 10)
    assert (report.away_seconds, report.first_away_seconds) == (14.0, 6.0)
    assert report.as_record()["share"] == 0.75
    assert "6 of 8 contributions" in str(report)
