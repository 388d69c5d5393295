"""docs/architecture_fit.md walks through the packages that a fit of two workers executes, each once."""

from __future__ import annotations

import pytest
from tests import fit_rooms

pytestmark = pytest.mark.long


def test_the_page_names_each_package_that_a_fit_executes_once():
    named = fit_rooms.named_on_page()
    assert len(named) == len({*named})
    assert {*fit_rooms.rooms(fit_rooms.measured())} == {*named}, "python -m tests.fit_rooms lists them"
