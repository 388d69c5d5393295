"""docs/architecture.md names the files that a fit of two workers executes, and how many they are."""

from __future__ import annotations

import pytest
from tests import fit_files

pytestmark = pytest.mark.long


def test_the_page_names_the_files_that_a_fit_executes():
    found = set(fit_files.measured())
    assert found == fit_files.named_on_page(), "python -m tests.fit_files lists them"
    assert len(found) == fit_files.number_on_page()
