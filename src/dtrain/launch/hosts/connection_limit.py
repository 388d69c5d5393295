"""Limits unauthenticated connections on a listening socket whose connections another library accepts."""

from __future__ import annotations

import ctypes
import socket
import struct

_MOST_UNAUTHENTICATED = 64  # that may be open; beyond that, no further connection is accepted
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27  # <asm-generic/socket.h>
_RETURN_0 = (0x06, 0, 0, 0)  # the instruction of a packet filter that drops every packet


class ConnectionLimit:
    """Accepts no further connections while too many unauthenticated ones are open.

    ZeroMQ cannot stop accepting without closing all connections, so the kernel drops new ones: by a packet
    filter on the listening socket, which existing connections do not have. A refused client tries again.

    Args:
        listener: the listening socket.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._accepts = True

    def apply(self, unauthenticated: int) -> None:
        """Accept or refuse further connections; `unauthenticated` is the number of those open now."""
        if self._accepts and unauthenticated > _MOST_UNAUTHENTICATED:
            drop_all = ctypes.create_string_buffer(struct.pack("HBBI", *_RETURN_0))
            program = struct.pack("HP", 1, ctypes.addressof(drop_all))
            self._listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
            self._accepts = False
        elif not self._accepts and unauthenticated < _MOST_UNAUTHENTICATED // 2:
            self._listener.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
            self._accepts = True
