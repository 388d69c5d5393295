"""The format of checkpoints on disk: the names of directories and files, and the content of markers.

It performs no file operation. A marker is JSON that contains its own checksum, so that a change is detected.
The files in a checkpoint's directory, for writer 0 of 2:

- `share-0-of-2.data`: the tensors that the writer wrote.
- `share-0-of-2.index`: a marker that lists these tensors in order, each with its size and checksum.
- `share-0-of-2.json`: a marker that says that the share is complete.
- `COMMITTED.json`: the marker that is written last and says that all shares are complete.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from dtrain.errors import CheckpointError

VERSION = 2
COMMITTED = "COMMITTED.json"
MOST_BYTES = 32 << 20
"""The largest marker and index; one of 100,000 variables has less than half of it."""

_DIRECTORY = re.compile(r"step-([0-9]{10,18})-([0-9]{3,18})-([A-Za-z0-9]{1,64})")
HINT = "Use an older checkpoint, or start again in an empty folder."


class CheckpointName(NamedTuple):
    """The parts of the name of a checkpoint's directory; names are ordered by step, then by serial.

    Attributes:
        step: the step after which the checkpoint was taken.
        serial: distinguishes checkpoints of one step.
        token: the token of the attempt that wrote it.
    """

    step: int
    serial: int
    token: str

    def __str__(self) -> str:
        return f"step-{self.step:010d}-{self.serial:03d}-{self.token}"


def parse_name(directory: str) -> CheckpointName | None:
    """Parses the name of a directory; returns None if it is not a checkpoint's."""
    match = _DIRECTORY.fullmatch(directory)
    return CheckpointName(int(match[1]), int(match[2]), match[3]) if match else None


def share_prefix(share: int, writers: int) -> str:
    """The prefix of the names of all files of a share."""
    return f"share-{share}-of-{writers}"


def tensor_files(prefix: str) -> tuple[str, str]:
    """The names of the files that hold tensors: the index and the data."""
    return f"{prefix}.index", f"{prefix}.data"


def whole_marker(share: int, writers: int) -> str:
    """The name of the marker that says that a share is complete."""
    return f"{share_prefix(share, writers)}.json"


def failure_marker(share: int, writers: int) -> str:
    """The name of the marker that says that writing a share failed."""
    return f"{share_prefix(share, writers)}.failed.json"


def checksum(content: bytes) -> int:
    """The CRC-32 checksum of `content`."""
    return zlib.crc32(content)


def encode(content: Mapping[str, Any]) -> bytes:
    """Encodes the content of a marker as bytes, with its checksum.

    Raises:
        TypeError: the content has a value that JSON cannot hold.
        CheckpointError: the marker would be larger than `MOST_BYTES`, and could not be read.
    """
    text = _canonical(content)
    if len(text) > MOST_BYTES - 100:
        raise CheckpointError(
            f"a marker of the checkpoint would have {len(text)} bytes; it can have {MOST_BYTES - 100}",
            hint="Save fewer variables, or fewer values.",
        )
    return b'{"checksum":%d,"content":%s}\n' % (checksum(text), text)


def decode(marker: bytes, path: str) -> dict[str, Any]:
    """Decodes a marker, and returns its content.

    Args:
        marker: the bytes of the marker.
        path: where the bytes come from, for messages.

    Raises:
        CheckpointError: the marker is incomplete or was changed, or its format has an unknown version.
    """
    try:
        content = json.loads(marker)["content"]
        # Encoding the content again must give the same bytes: this also detects changes outside of it.
        whole = isinstance(content, dict) and encode(content) == marker
    except (ValueError, KeyError, TypeError, RecursionError, CheckpointError):
        whole = False
    if not whole:
        raise CheckpointError(f"{path} is incomplete or was changed: its checksum is wrong.", hint=HINT)
    if content.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has the format {content.get('version')!r}; this dtrain knows {VERSION}.",
            hint="Read it with the version of dtrain that wrote it.",
        )
    return dict(content)


def _canonical(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode("ascii")
