"""A dataclass as options of the command line, and back."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import pytest

from dtrain.base.option_fields import declare, given_options, option, own_fields, to_arguments


@dataclass(frozen=True, kw_only=True)
class Switches:
    fast: bool = option(False, "a switch")
    name: str | None = option(None, "a word", metavar="NAME")
    many: int = option(1, "a number", metavar="N")


@pytest.mark.parametrize("given", [Switches(), Switches(fast=True), Switches(name="-odd", many=0)])
def test_options_become_arguments_and_options_again(given: Switches) -> None:
    parser = argparse.ArgumentParser()
    declare(parser, own_fields(Switches))
    found = given_options(parser.parse_args(to_arguments(given)), own_fields(Switches))
    assert Switches(**found) == given
