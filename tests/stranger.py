"""A foreign client of the first worker's port: calls TensorFlow's coordination service without being a task.

Run as a program, it makes the calls in a JSON list, [[METHOD, KEY, VALUE], ...], and prints the answers.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any


def ask(address: str, *calls: tuple[str, str, str]) -> list[Any]:
    """Make calls from a separate process.

    Args:
        address: the address of the first worker.
        calls: ("list", FOLDER, ""), which returns the keys and values in a folder; ("insert", KEY, VALUE) and
            ("overwrite", KEY, VALUE), which return "" or the error.
    """
    done = subprocess.run(
        [sys.executable, __file__, address, json.dumps(calls)], capture_output=True, text=True, check=True
    )
    found: list[Any] = json.loads(done.stdout)
    return found


def _number(value: int) -> bytes:
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def _field(number: int, content: bytes) -> bytes:
    return _number(number << 3 | 2) + _number(len(content)) + content


def _fields(message: bytes) -> dict[int, list[bytes]]:
    """The fields of a protocol buffer that has only strings and messages."""
    found: dict[int, list[bytes]] = {}
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while at < len(message):
        name = number() >> 3
        size = number()
        found.setdefault(name, []).append(message[at : at + size])
        at += size
    return found


def _call(channel: Any, method: str, key: str, value: str) -> Any:
    import grpc

    names = {"list": "GetKeyValueDir", "insert": "InsertKeyValue", "overwrite": "InsertKeyValue"}
    request = _field(1, key.encode())
    if method != "list":
        request = _field(1, request + _field(2, value.encode()))
    if method == "overwrite":
        request += _number(2 << 3) + b"\1"
    try:
        answer = channel.unary_unary(f"/tensorflow.CoordinationService/{names[method]}")(request, timeout=20)
    except grpc.RpcError as error:
        return error.details()
    if method != "list":
        return ""
    entries = [_fields(entry) for entry in _fields(answer).get(2, [])]
    return {entry[1][0].decode(): entry.get(2, [b""])[0].decode() for entry in entries}


def main() -> None:
    """Make the calls of the command line, and print the answers."""
    import grpc

    with grpc.insecure_channel(sys.argv[1]) as channel:
        print(json.dumps([_call(channel, *call) for call in json.loads(sys.argv[2])]))


if __name__ == "__main__":
    main()
