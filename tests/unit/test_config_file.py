"""`--config FILE`: what its keys mean, what the command line changes, and what is refused."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from dtrain import cli
from dtrain.cli import launch, train
from dtrain.cli.parser import Parser
from dtrain.cli.worker_counts import Workers
from dtrain.environments.gpu_shares import ALL


def parsed(command: Any, folder: Path, text: str, *typed: str) -> argparse.Namespace:
    (folder / "job.toml").write_text(text)
    parser = Parser(prog="dtrain")
    command.add_arguments(parser)
    found: argparse.Namespace = parser.parse_args(["--config", str(folder / "job.toml"), *typed])
    return found


EVERY_KIND = """
workers = "1:3"
max-restarts = 2
hang_timeout = "auto"
grace = 0.5
spares = "none"
mpi = false
log-device-placement = true
traceback = true
gpus_per_worker = "all"
hosts = "a:2,b:2"
env = ["TOKEN", "HOME"]
log-dir = "logs of = it"
m = true
script = "train"
args = ["--lr", "0.1", "--", "-n", "2"]
"""


def test_every_option_is_a_key(tmp_path: Path) -> None:
    found = parsed(launch, tmp_path, EVERY_KIND)
    assert found.workers == Workers(3, 1) and found.max_restarts == 2 and found.grace == 0.5
    assert found.hang_timeout is None and found.spares == 0 and not hasattr(found, "mpi")
    assert (
        found.log_device_placement
        and found.traceback
        and found.gpus_per_worker == ALL
        and found.hosts == "a:2,b:2"
    )
    assert found.env == ["TOKEN", "HOME"] and found.log_dir == "logs of = it"
    assert found.is_module and found.script == "train" and found.args == ["--lr", "0.1", "--", "-n", "2"]


@pytest.mark.parametrize(
    ("typed", "changed"),
    [
        (["-n", "4"], {"workers": Workers(4, 4)}),
        (["-n4", "--grace=9"], {"workers": Workers(4, 4), "grace": 9.0}),
        (["--env", "USER"], {"env": ["USER"]}),
        (["other.py"], {"script": "other.py"}),
        (["--", "other.py"], {"script": "other.py"}),
        (["other.py", "--config", "its own"], {"script": "other.py", "args": ["--config", "its own"]}),
    ],
)
def test_the_command_line_takes_precedence(tmp_path: Path, typed: list[str], changed: dict[str, Any]) -> None:
    usual, found = parsed(launch, tmp_path, EVERY_KIND), parsed(launch, tmp_path, EVERY_KIND, *typed)
    assert vars(found) == vars(usual) | changed


def test_a_recipe_and_its_options_are_keys_too(tmp_path: Path) -> None:
    text = 'recipe = "digits"\nepochs = 3\nlearning_rate = 1\nworkers = 2\n'
    found = parsed(train, tmp_path, text, "--epochs", "4")
    assert (found.recipe, found.epochs, found.learning_rate, found.workers.most) == ("digits", 4, 1.0, 2)
    assert parsed(train, tmp_path, text, "imdb").recipe == "imdb"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("worker = 2", ["there is no option 'worker'", "Did you mean 'workers'?"]),
        ("config = 'b'", ["there is no option 'config'"]),
        ("[launch]\nworkers = 2", ["there is no option 'launch'"]),
        ("workers = 2\nn = 3", ["workers and n are the same option"]),
        ("max-restarts = 2\nmax_restarts = 3", ["max-restarts and max_restarts are the same"]),
        ("workers = true", ["workers is True, a boolean"]),
        ("workers = 2.0", ["workers is 2.0: '2.0' is not an integer of at least 1"]),
        ("workers = [2]", ["workers is [2], a list"]),
        ("max_restarts = '2'", ["max_restarts is '2', a string", "a number, without quotes"]),
        ("grace = nan", ["grace is nan: 'nan' is not a positive number of seconds"]),
        ("mpi = 'yes'", ["mpi is 'yes', a string", "true or false"]),
        ("log-dir = 3", ["log-dir is 3, a number", "a string, in quotes"]),
        ("env = 'TOKEN'", ["env is 'TOKEN', a string", "a list of strings"]),
        ("args = ['--epochs', 3]", ["args is ['--epochs', 3], a list", "a list of strings"]),
        ("script = 2020-01-01", ["a date or time"]),
        ("workers 2", ["is not valid TOML", "workers = 2"]),
        ("workers = 2", ["the following arguments are required: script"]),
        ("args = ['a']", ["the following arguments are required: script"]),
        ("script = '/no/such.py'", ["There is no script '/no/such.py'"]),
    ],
)
def test_what_a_file_cannot_have(
    tmp_path: Path, text: str, said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.toml"
    path.write_text(text)
    assert cli.main(["launch", "--config", str(path)]) == 2
    shown = capsys.readouterr().err
    for words in said:
        assert words in shown


def test_a_file_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "binary").write_bytes(b"\xff")
    for path, words in (
        (tmp_path, "Is a directory"),
        (tmp_path / "none", "No such"),
        (tmp_path / "binary", "TOML"),
    ):
        assert cli.main(["launch", f"--config={path}", "-m", "this"]) == 2
        shown = capsys.readouterr().err
        assert str(path) in shown and words in shown
