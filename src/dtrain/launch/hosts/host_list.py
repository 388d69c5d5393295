"""Reads the hosts of a job and the number of workers on each, from `a:2,b:2` or from a hostfile."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from dtrain.base import safe_files
from dtrain.base.counts import parse_count
from dtrain.base.tcp import host_problem
from dtrain.environments.topology import MOST_TASKS
from dtrain.errors import ConfigurationError

_EXAMPLE = "Write them as a:2,b:2, or in a hostfile one on a line: a slots=2."
# A name or an address as `ssh` takes it, with or without a user. In --hosts an IPv6 address is in brackets.
_HOST = r"(?:[\w.-]+@)?(?!-)(?:[\w.-]+|\[[0-9A-Fa-f:.%\w]+\])"
_ENTRY = re.compile(rf"({_HOST})(?::([0-9]+))?")
_LINE = re.compile(rf"({_HOST}|[0-9A-Fa-f:.]+)(?:\s+slots\s*=\s*([0-9]+))?")
_MOST_BYTES = 16 << 20  # of a hostfile


def parse_hosts(text: str, slots: int = 1) -> dict[str, int]:
    """The hosts in a text such as `a:2,b:2`, and the number of workers on each.

    Args:
        text: the hosts.
        slots: the number of workers on a host for which the text gives none.

    Raises:
        ConfigurationError: the text has another form, or names a host twice.
    """
    return _collect(((entry.strip(), "--hosts") for entry in text.split(",")), _ENTRY, slots)


def read_hostfile(path: Path, slots: int = 1) -> dict[str, int]:
    """The hosts in a file that has lines such as `a slots=2`; `#` begins a comment.

    Args:
        path: the file.
        slots: the number of workers on a host for which the file gives none.

    Raises:
        ConfigurationError: the file cannot be read, has a malformed line, or names a host twice.
    """
    try:
        lines = safe_files.read_text(path, _MOST_BYTES, links=True).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"The hostfile {path} cannot be read: {error}.", hint=_EXAMPLE) from error
    stripped = ((line.partition("#")[0].strip(), number) for number, line in enumerate(lines, 1))
    return _collect(((line, f"{path}, line {number}") for line, number in stripped if line), _LINE, slots)


def _collect(entries: Iterable[tuple[str, str]], form: re.Pattern[str], slots: int) -> dict[str, int]:
    hosts: dict[str, int] = {}
    all_slots = 0
    for text, place in entries:
        match = form.fullmatch(text)
        number = slots if match is None or match[2] is None else parse_count(match[2], MOST_TASKS)
        if match is None or not number:
            raise ConfigurationError(
                f"{place}: {text[:80]!r} is no host with a number of workers, up to {MOST_TASKS}.",
                hint=_EXAMPLE,
            )
        host = match[1].replace("[", "").replace("]", "")
        if problem := host_problem(host.rpartition("@")[2]):
            raise ConfigurationError(f"{place}: {text[:80]!r} {problem}.", hint=_EXAMPLE)
        if host in hosts:
            raise ConfigurationError(
                f"{place}: the host {host} is named twice.",
                hint=f"Name it once, with all of its workers, such as {host}:{2 * slots}.",
            )
        hosts[host] = number
        if (all_slots := all_slots + number) > MOST_TASKS:
            raise ConfigurationError(
                f"{place}: up to here the hosts have {all_slots} workers, more than {MOST_TASKS}.",
                hint="Name fewer hosts, or fewer workers on each.",
            )
    if not hosts:
        raise ConfigurationError("No host was given.", hint=_EXAMPLE)
    return hosts
