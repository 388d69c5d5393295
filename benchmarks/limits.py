"""What the machine itself can do: copies in memory, and bytes between two processes through a socket.

    python benchmarks/limits.py [--megabytes 30] [--rounds 9] [--out FILE.json]

No training gets past these. Two processes, each on a core of its own, work at the same time, as two workers
do.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import statistics
import threading
import time
from typing import Any

import jobs
import numpy as np
import workers


def copies(size: int, rounds: int) -> list[float]:
    """Seconds to copy so many bytes, round by round."""
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    found = []
    for _ in range(rounds + 1):
        begun = time.perf_counter()
        np.copyto(target, source)
        found.append(time.perf_counter() - begun)
    return found[1:]


def exchanges(connection: socket.socket, size: int, rounds: int) -> list[float]:
    """Seconds to send so many bytes to the other process while as many come from it, round by round."""
    data, arrived = memoryview(bytes(size)), memoryview(bytearray(size))
    found = []
    for _ in range(rounds + 1):
        connection.sendall(b".")
        connection.recv(1)
        begun = time.perf_counter()
        sender = threading.Thread(target=connection.sendall, args=(data,))
        sender.start()
        got = 0
        while got < size:
            got += connection.recv_into(arrived[got:])
        sender.join()
        found.append(time.perf_counter() - begun)
    return found[1:]


def bounces(connection: socket.socket, rounds: int) -> list[float]:
    """Seconds of a round trip of 40 bytes."""
    found = []
    for _ in range(rounds):
        begun = time.perf_counter()
        connection.sendall(bytes(40))
        connection.recv(40, socket.MSG_WAITALL)
        found.append((time.perf_counter() - begun) / 2)
    return found


def work(number: int, address: Any, size: int, rounds: int, answers: Any) -> None:
    """One of the two processes."""
    workers.pin(number)
    if number == 0:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address.put(listener.getsockname())
            connection, _ = listener.accept()
    else:
        connection = socket.create_connection(address.get(timeout=30))
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        exchanges(connection, 1, 1)
        found = {
            "copy": copies(size, rounds),
            "socket": exchanges(connection, size, rounds),
            "small": bounces(connection, 1000),
        }
    answers.put(found)


def measure(size: int, rounds: int) -> dict[str, Any]:
    """Both processes' medians; the slower one counts."""
    context = multiprocessing.get_context("spawn")
    address, answers = context.Queue(), context.Queue()
    processes = [
        context.Process(target=work, args=(number, address, size, rounds, answers)) for number in range(2)
    ]
    for process in processes:
        process.start()
    try:
        found = [answers.get(timeout=120) for _ in processes]
    finally:
        for process in processes:
            process.join(10)
            process.kill()
    seconds = {name: max(statistics.median(each[name]) for each in found) for name in found[0]}
    return {
        "bytes": size,
        "copy_gigabytes_a_second": round(size / seconds["copy"] / 1e9, 2),
        "copy_milliseconds": round(1e3 * seconds["copy"], 3),
        "socket_gigabytes_a_second": round(size / seconds["socket"] / 1e9, 2),
        "socket_milliseconds": round(1e3 * seconds["socket"], 3),
        "socket_40_bytes_microseconds": round(1e6 * seconds["small"], 1),
    }


def main() -> None:
    """Measures, prints a table and writes JSON."""
    parser = argparse.ArgumentParser(description="memcpy and a raw socket")
    parser.add_argument("--megabytes", type=float, default=30.0)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", help="where the JSON goes instead of the screen")
    asked = parser.parse_args()
    found = {**jobs.circumstances(), **measure(int(asked.megabytes * 1e6), asked.rounds)}
    print("| | |\n|---|---|")
    for name in (
        "copy_gigabytes_a_second",
        "copy_milliseconds",
        "socket_gigabytes_a_second",
        "socket_milliseconds",
        "socket_40_bytes_microseconds",
    ):
        print(f"| {name.replace('_', ' ')} | {found[name]} |")
    jobs.write(found, asked.out)


if __name__ == "__main__":
    main()
