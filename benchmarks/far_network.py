"""A job whose parameter servers, or half of its workers, are behind a link that is late or slow.

    python benchmarks/far_network.py --workers 2 --servers 1 --delay 2 --rate 10 -- COMMAND...

Without servers there is no chief, and every other worker is on the far side.
Two network namespaces of Linux; a process carries what one sends to the other, after the delay. It needs
root, `ip`, `tc` and /dev/net/tun. All delays are real: nothing is computed from them.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import fcntl
import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator

NEAR, FAR = "10.77.14.1", "10.77.14.2"
FIRST_PORT = 21000
PACKET = 65000  # bytes at most
_TUN_SET, _TUN, _NO_HEADER = 0x400454CA, 0x0001, 0x1000  # of <linux/if_tun.h>
_END_SECONDS = 10.0


def command(program: list[str], *, workers: int, servers: int, delay: float, rate: float) -> list[str]:
    """What starts a program as every task of such a job; arguments as those of the script."""
    options = [
        "--workers",
        str(workers),
        "--servers",
        str(servers),
        "--delay",
        str(delay),
        "--rate",
        str(rate),
    ]
    return [sys.executable, __file__, *options, "--", *program]


class Link:
    """A device in each of two namespaces, and what is on its way between them.

    Args:
        names: of the namespaces.
        delay: seconds that a packet takes.
        rate: bytes a second that a device sends at most; 0 for any.
    """

    def __init__(self, names: tuple[str, str], delay: float, rate: float) -> None:
        self._delay = delay
        self._files = [self._device(name, i, rate) for i, name in enumerate(names)]
        self._late: list[collections.deque[tuple[float, bytes]]] = [collections.deque(), collections.deque()]

    @staticmethod
    def _device(name: str, number: int, rate: float) -> int:
        device = f"far{os.getpid() % 100000}{'ab'[number]}"
        file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(file, _TUN_SET, struct.pack("16sH", device.encode(), _TUN | _NO_HEADER))
        _ip("link", "set", device, "netns", name)
        _ip("-n", name, "address", "add", f"{(NEAR, FAR)[number]}/24", "dev", device)
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", name, "link", "set", device, "mtu", str(PACKET), "txqueuelen", "10000", "up")
        if rate:
            limit = ["rate", f"{int(rate * 8)}bit", "burst", "256kb", "latency", "500ms"]
            _run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", device, "root", "tbf", *limit)
        return file

    async def carry(self) -> None:
        """Carries packets for ever."""
        loop = asyncio.get_running_loop()
        for number in (0, 1):
            loop.add_reader(self._files[number], self._take, number)
        await asyncio.Event().wait()

    def _take(self, number: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                packet = os.read(self._files[number], 1 << 16)
                if not self._delay:
                    os.write(self._files[1 - number], packet)
                    continue
                late = self._late[number]
                late.append((time.monotonic() + self._delay, packet))
                if len(late) == 1:
                    asyncio.get_running_loop().call_later(self._delay, self._give, number)

    def _give(self, number: int) -> None:
        late = self._late[number]
        while late and late[0][0] <= time.monotonic():
            os.write(self._files[1 - number], late.popleft()[1])
        if late:
            wait = late[0][0] - time.monotonic()
            asyncio.get_running_loop().call_later(max(0.0, wait), self._give, number)


@contextlib.contextmanager
def namespaces() -> Iterator[tuple[str, str]]:
    """Two, which are removed at the end."""
    names = (f"dtrain-{os.getpid()}-near", f"dtrain-{os.getpid()}-far")
    try:
        for name in names:
            _ip("netns", "add", name)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@contextlib.contextmanager
def tasks(
    program: list[str], names: tuple[str, str], workers: int, servers: int
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """All processes of the job, the chief's or first worker's first. None is left at the end."""
    places = ["chief", *["worker"] * workers, *["ps"] * servers] if servers else ["worker"] * workers
    cluster: dict[str, list[str]] = {}
    started = []
    far = {}
    for number, job in enumerate(places):
        addresses = cluster.setdefault(job, [])
        far[job, len(addresses)] = job == "ps" if servers else bool(number % 2)
        addresses.append(f"{FAR if far[job, len(addresses)] else NEAR}:{FIRST_PORT + number}")
    try:
        for job, addresses in cluster.items():
            for index in range(len(addresses)):
                config = json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})
                inside = ["ip", "netns", "exec", names[far[job, index]], *program]
                env = {**os.environ, "TF_CONFIG": config}
                # As `dtrain launch` starts them, so that the system gives them time alike.
                started.append(subprocess.Popen(inside, env=env, start_new_session=True))
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


async def _until_done(started: list[subprocess.Popen[bytes]], link: Link) -> int:
    """Waits for the first process, and some time for the others; its status."""
    carrying = asyncio.ensure_future(link.carry())
    while started[0].poll() is None:
        await asyncio.sleep(0.1)
    limit = time.monotonic() + _END_SECONDS
    while any(process.poll() is None for process in started) and time.monotonic() < limit:
        await asyncio.sleep(0.1)
    carrying.cancel()
    return started[0].wait()


def main() -> int:
    """Runs the job to its end; the status is the first process'."""
    parser = argparse.ArgumentParser(description="a job whose parameter servers, or peers, are far away")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--delay", type=float, default=0.0, help="milliseconds each way")
    parser.add_argument("--rate", type=float, default=0.0, help="Gbit/s each way")
    parser.add_argument("program", nargs="+")
    arguments = parser.parse_args()
    # A session of its own, as the tasks have: else the link is slow where what started it is nice.
    with contextlib.suppress(PermissionError):
        os.setsid()
    # SIGTERM ends the tasks, too, and removes the namespaces.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with namespaces() as names:
        link = Link(names, arguments.delay / 1e3, arguments.rate * 1e9 / 8)
        with tasks(arguments.program, names, arguments.workers, arguments.servers) as started:
            return asyncio.run(_until_done(started, link))


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


if __name__ == "__main__":
    raise SystemExit(main())
