"""How a checkpoint is called on the disk, and what its markers say: the format, and nothing that acts.

A marker is JSON that holds its own checksum, so that a byte that changed in it is noticed. The directory
of a checkpoint: `share-0-of-2.data` holds the tensors that writer 0 of 2 wrote, `share-0-of-2.index` says, as
a marker does, where each lies and what its checksum is, `share-0-of-2.json` says that they are whole, and
`COMMITTED.json`, the last, that all shares are.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from dtrain.errors import CheckpointError, ConfigurationError

VERSION = 2
COMMITTED = "COMMITTED.json"

_DIRECTORY = re.compile(r"step-(\d{10,})-(\d{3,})-([A-Za-z0-9]+)")
HINT = "Use an older checkpoint; the next ones are written anew."


class Name(NamedTuple):
    """What the name of a checkpoint's directory says; the order of names is that of checkpoints.

    Attributes:
        step: the step after which it was taken.
        serial: tells several of one step apart.
        token: the word of the attempt that wrote it.
    """

    step: int
    serial: int
    token: str

    def __str__(self) -> str:
        return f"step-{self.step:010d}-{self.serial:03d}-{self.token}"


def parse_name(directory: str) -> Name | None:
    """The name of a directory as its parts; None if it is not a checkpoint's."""
    found = _DIRECTORY.fullmatch(directory)
    return Name(int(found[1]), int(found[2]), found[3]) if found else None


def check_token(token: str) -> None:
    """Refuse a word that cannot stand in a directory's name.

    Raises:
        ConfigurationError: it is empty or has other signs than letters and digits.
    """
    if not re.fullmatch(r"[A-Za-z0-9]+", token):
        raise ConfigurationError(
            f"token={token!r} cannot stand in the name of a checkpoint.", hint="letters and digits of ASCII"
        )


def share_prefix(share: int, writers: int) -> str:
    """What the names of all files of a share begin with."""
    return f"share-{share}-of-{writers}"


def tensor_files(prefix: str) -> tuple[str, str]:
    """The names of the files that hold tensors: the index and the data."""
    return f"{prefix}.index", f"{prefix}.data"


def whole_marker(share: int, writers: int) -> str:
    """The name of the file that says that a share is whole."""
    return f"{share_prefix(share, writers)}.json"


def failure_marker(share: int, writers: int) -> str:
    """The name of the file that says that a share will not come."""
    return f"{share_prefix(share, writers)}.failed.json"


def checksum(content: bytes) -> int:
    """CRC-32."""
    return zlib.crc32(content)


def encode(content: Mapping[str, Any]) -> bytes:
    """A marker as bytes.

    Raises:
        TypeError: something in it is no JSON.
    """
    text = _canonical(content)
    return b'{"checksum":%d,"content":%s}\n' % (checksum(text), text)


def decode(marker: bytes, path: str) -> dict[str, Any]:
    """What a marker says.

    Args:
        marker: its bytes.
        path: where they come from, for messages.

    Raises:
        CheckpointError: it is not as it was written, or it is of a version that is not known.
    """
    try:
        content = json.loads(marker)["content"]
        # Written again, it must be the same to the byte: so nothing in it can have changed unseen.
        whole = encode(content) == marker
    except (ValueError, KeyError, TypeError, RecursionError):
        whole = False
    if not whole:
        raise CheckpointError(f"{path} is torn or was changed: its checksum is wrong.", hint=HINT)
    if content.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has the format {content.get('version')!r}; this dtrain knows {VERSION}.",
            hint="Read it with the version of dtrain that wrote it.",
        )
    return dict(content)


def _canonical(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode("ascii")
