"""Messages between a caller and its zygote, with file descriptors, over a socket of one machine."""

from __future__ import annotations

import pickle
import socket
import struct
from collections.abc import Sequence
from typing import Any

_LENGTH = struct.Struct("!I")


def send(to: socket.socket, message: Any, descriptors: Sequence[int] = ()) -> None:
    """Send a message that can be pickled."""
    content = pickle.dumps(message)
    socket.send_fds(to, [_LENGTH.pack(len(content))], descriptors)
    to.sendall(content)


def receive(of: socket.socket) -> tuple[Any, list[int]]:
    """The next message and its descriptors.

    Raises:
        EOFError: the other side has ended.
    """
    head, descriptors, _, _ = socket.recv_fds(of, _LENGTH.size, 250)
    head += _exactly(of, _LENGTH.size - len(head))
    return pickle.loads(_exactly(of, _LENGTH.unpack(head)[0])), descriptors


def _exactly(of: socket.socket, size: int) -> bytes:
    content = b""
    while len(content) < size:
        part = of.recv(size - len(content))
        if not part:
            raise EOFError
        content += part
    return content
