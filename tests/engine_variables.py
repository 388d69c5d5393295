"""The variables that real engines set for a task, recorded: those that are read, or that name the engine.

Tests of one process read them here. The tests that run an engine compare what it sets with them, so a version
that sets others is noticed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

RAY_ACTOR = {
    "RAY_CLIENT_MODE": "0",
    "RAY_JOB_ID": "ffffffff",
    "RAY_LD_PRELOAD_ON_WORKERS": "0",
    "RAY_RAYLET_PID": "10896",
}
"""Of Ray 2.60, in an actor, a task, and what these start."""


def assert_as_recorded(
    env: Mapping[str, str], recorded: Mapping[str, str], *, varying: Collection[str] = ()
) -> None:
    """Fail unless an engine has set the recorded variables, and but for the varying ones to these values."""
    found = {name: env.get(name) for name in recorded}
    assert None not in found.values(), found
    assert found == {**recorded, **{name: found[name] for name in varying}}
