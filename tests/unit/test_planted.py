"""The changes that show that same-bits finds wrong numbers can still be planted in the package as it is."""

from __future__ import annotations

import pytest
from tests.contract.harness import ROOT
from tests.same_bits.planted import Planted, read_planted


@pytest.mark.parametrize("planted", read_planted(), ids=lambda planted: planted.what)
def test_the_text_is_there_once(planted: Planted) -> None:
    text = (ROOT / "src" / "dtrain" / planted.file).read_text(encoding="utf-8")
    assert text.count(planted.old) == 1
