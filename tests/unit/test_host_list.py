"""`--hosts` and `--hostfile`: what they mean and what is refused; which variables go to other hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtrain import cli
from dtrain.errors import ConfigurationError
from dtrain.launch.hosts.host_list import parse_hosts, read_hostfile
from dtrain.launch.hosts.ssh_launcher import passed_environment


def test_hosts_keep_their_order_and_their_numbers() -> None:
    assert list(parse_hosts("b:2, me@a-1.example:10,[fd77::2]:3,c", slots=4).items()) == [
        ("b", 2),
        ("me@a-1.example", 10),
        ("fd77::2", 3),
        ("c", 4),
    ]


def test_a_hostfile_has_a_host_on_each_line(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# all\nb slots=2\n\n  a   slots = 3 # comment\nfd77::2\n")
    assert list(read_hostfile(path, slots=4).items()) == [("b", 2), ("a", 3), ("fd77::2", 4)]


@pytest.mark.parametrize(
    "text", ["", "a,", "a:0", "a:x", "a:2:2", "a b", "-oProxyCommand=x", "me@-x", "a;b:2"]
)
def test_hosts_that_cannot_be(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"--hosts: .* is no host with a number of workers"):
        parse_hosts(text)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a slots=2\nb slots=0\n", "line 2: 'b slots=0'"),
        ("a 2\n", "line 1: 'a 2'"),
        ("a slots=2 max_slots=4\n", "line 1"),
        ("a\n\na slots=2\n", "line 3: the host a is named twice"),
        ("# nobody\n", "No host was given"),
    ],
)
def test_hostfiles_that_cannot_be(tmp_path: Path, text: str, part: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=part):
        read_hostfile(path)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ("--hosts a:2,a:1", "the host a is named twice"),
        ("--hostfile /nowhere/hosts", "/nowhere/hosts cannot be read"),
        ("--hosts a --hostfile b", "--hosts and --hostfile exclude each other"),
        ("--hosts a --node-rank 0", "--hosts and --node-rank exclude each other"),
        ("--hosts a -n 2", "--hosts and --workers exclude each other"),
        (
            "--hosts a --env NOT_SET_AT_ALL",
            "NOT_SET_AT_ALL is to be copied to all hosts, but it is not set here",
        ),
        ("--env HOME", "--env is for workers on other machines"),
    ],
)
def test_options_of_hosts_that_cannot_be(options: str, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["launch", *options.split(), "-m", "this"]) != 0
    assert part in capsys.readouterr().err


def test_hosts_get_the_variables_of_training_and_those_that_are_named() -> None:
    env = {
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "PYTHONPATH": "/code",
        "TOKEN": "t",
        "HOME": "/home/me",
        "TF_CONFIG": "{}",
        "DTRAIN_SECRET_FILE": "/run/secret",
        "DTRAIN_LAUNCH_ID": "1-2",
    }
    assert set(passed_environment(env, ["TOKEN"])) == {"TF_CPP_MIN_LOG_LEVEL", "PYTHONPATH", "TOKEN"}
