"""Hosts for tests: Linux namespaces that have a network, a name, files and processes of their own.

    with hosts(tmp_path, 2, rate=1e9) as (one, other):
        one.run(["ssh", other.name, "true"])

It starts no job and knows nothing of dtrain. A host is a process that waits for the end of a pipe, the first
process of its PID namespace. When the test ends, in whatever way, the kernel ends all processes of the host
and removes its namespaces. All hosts share this machine's files, except the folders that `own` names,
`/dev/shm`, `/run`, `/etc/hosts` and `/etc/ssh`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from processes import processes_with

_TOOLS = ("unshare", "nsenter", "ip", "tc", "bridge", "mount")
_FOLDERS = ("/dev/shm", "/run")
_SSH_SERVER = """\
HostKey /etc/ssh/host_key
AuthorizedKeysFile /etc/ssh/authorized_keys
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
PidFile none
MaxStartups 100
"""
_SSH_CLIENT = """\
IdentityFile /etc/ssh/client_key
StrictHostKeyChecking yes
BatchMode yes
"""


class HostsNotPermitted(Exception):
    """Hosts cannot be made on this machine; the message is the reason."""


class Host:
    """One host. `hosts` makes it.

    Attributes:
        name: its host name, which all hosts resolve to `address`.
        address: of IPv4, on the interface `eth0`.
        address6: of IPv6.
        second: of IPv4 on `eth1`, if `hosts` was asked for a second network.
        folder: this host's own versions of `/etc/hosts` and `/etc/ssh`, and the log of its SSH server.
    """

    def __init__(self, folder: Path, number: int, name: str) -> None:
        self.name, self.folder = name, folder
        self.address, self.address6 = f"10.77.0.{number}", f"fd77::{number}"
        self.second = f"10.78.0.{number}"
        self._device = f"host{number}"
        self._space: _Namespaces
        self._switch: _Namespaces

    def popen(self, command: Sequence[str], **options: Any) -> HostProcess:
        """Starts a command on this host, in this process' working directory if no `cwd` is given."""
        folder = options.pop("cwd", None) or Path.cwd()
        return HostProcess([*self._space.enter(), "env", f"--chdir={folder}", *command], **options)

    def run(self, command: Sequence[str], *, timeout: float | None = None, **options: Any) -> Any:
        """Runs a command on this host to its end; what `subprocess.run` returns, with the output as text.

        Raises:
            subprocess.TimeoutExpired: it took longer than `timeout` seconds, if any, and was killed.
        """
        options = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
        } | options
        with self.popen(command, **options) as process:
            try:
                output, errors = process.communicate(timeout=timeout)
            except BaseException:
                process.kill()
                raise
        return subprocess.CompletedProcess(list(command), process.returncode, output, errors)

    def path(self, path: str | Path) -> Path:
        """Where this process finds a file of the host, while the host is there."""
        return Path(f"/proc/{self._space.pid}/root{path}")

    def limit(self, rate: float) -> None:
        """Limits the host to `rate` bits a second in each direction; 0 removes the limit."""
        for space, device in ((self._space, "eth0"), (self._switch, self._device)):
            space.run("tc", "qdisc", "delete", "dev", device, "root", check=False)
            if rate:
                # The burst must hold a packet of 64 KiB, and the bytes of one tick of the kernel's timer.
                burst = max(256 * 1024, int(rate / 8 / 200))
                shape = ["tbf", "rate", f"{int(rate)}bit", "burst", str(burst), "latency", "500ms"]
                space.run("tc", "qdisc", "add", "dev", device, "root", *shape)

    def cut(self, *, silent: bool = True) -> None:
        """Disconnects the host: if `silent`, drops its packets; else its network device loses the carrier."""
        if silent:
            self._switch.run("bridge", "link", "set", "dev", self._device, "state", "0")
        else:
            self._switch.run("ip", "link", "set", self._device, "down")

    def reconnect(self) -> None:
        """Undoes `cut`."""
        self._switch.run("ip", "link", "set", self._device, "up")
        self._switch.run("bridge", "link", "set", "dev", self._device, "state", "3")

    def close_port(self, port: int, how: str = "drop") -> None:
        """Makes the host "drop" or "reject" packets for a TCP port; needs `nft`."""
        rules = f"""
            table inet dtrain {{
                chain input {{ type filter hook input priority 0; }}
            }}
            add rule inet dtrain input tcp dport {port} {how}{" with tcp reset" if how == "reject" else ""}
        """
        self._space.run("nft", "-f", "-", input=rules)

    def open_ports(self) -> None:
        """Undoes `close_port`, for all ports."""
        self._space.run("nft", "flush", "ruleset")

    def start_ssh_server(self) -> HostProcess:
        """Starts `sshd` on port 22; from every host, `ssh NAME` then connects without asking anything."""
        log = self.folder / "sshd.log"
        with log.open("w") as file:
            server = self.popen([_sshd(), "-D", "-e"], stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        while "listening" not in log.read_text():
            if server.poll() is not None:
                raise RuntimeError(f"sshd does not start on {self.name}: {log.read_text()}")
            time.sleep(0.02)
        return server

    def power_off(self) -> None:
        """Kills the host and all of its processes at once; no peer is notified."""
        self._switch.run("ip", "link", "delete", self._device, check=False)
        self._space.close()


class HostProcess(subprocess.Popen[Any]):
    """A process on a host. `pid` is that of `nsenter`, which waits for it. Signals reach the process."""

    @property
    def process_id(self) -> int:
        """The process id on this machine of the process itself.

        Raises:
            psutil.NoSuchProcess: it has ended.
        """
        while not (children := psutil.Process(self.pid).children()):
            if self.poll() is not None:
                raise psutil.NoSuchProcess(self.pid)
            time.sleep(0.005)
        inside: int = children[0].pid
        return inside

    def send_signal(self, sig: int) -> None:
        """Sends the process a signal; nothing if it has ended."""
        if self.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                os.kill(self.process_id, sig)

    def kill(self) -> None:
        """Ends the process at once."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Asks the process to end."""
        self.send_signal(signal.SIGTERM)


MakeHosts = Callable[..., list[Host]]
"""The type of the fixture `make_hosts`: `hosts` without its first argument."""


class _Namespaces:
    """The namespaces of a host; a shell prepares them, and then waits until this process ends."""

    def __init__(self, script: str = "") -> None:
        own = ["--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
        shell = ["sh", "-ec", f"{script}\nip link set lo up\necho ready\nexec cat >/dev/null"]
        pipe = subprocess.PIPE
        self._holder = subprocess.Popen(
            ["unshare", *own, *shell], stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
        assert self._holder.stdout is not None and self._holder.stderr is not None
        if self._holder.stdout.readline() != b"ready\n":
            reason = self._holder.stderr.read().decode(errors="replace").strip()
            self.close()
            raise HostsNotPermitted(f"this user may make no namespaces: {reason}")
        self.pid: int = psutil.Process(self._holder.pid).children()[0].pid

    def enter(self) -> list[str]:
        """The words to put before a command that should run in these namespaces."""
        return ["nsenter", f"--target={self.pid}", "--net", "--mount", "--uts", "--ipc", "--pid", "--"]

    def run(self, *command: str, check: bool = True, input: str = "") -> None:
        """Runs a tool in the network namespace only, because it gets process ids of this process's namespace.

        Raises:
            RuntimeError: it failed, unless `check` is False.
        """
        done = subprocess.run(
            ["nsenter", f"--target={self.pid}", "--net", "--", *command],
            capture_output=True,
            text=True,
            input=input,
        )
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")

    def __enter__(self) -> _Namespaces:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def kill(self) -> None:
        """Kills all processes in the namespaces, without waiting for their end."""
        self._holder.kill()

    def close(self) -> None:
        """Kills all processes in the namespaces, and waits for their end."""
        self.kill()
        self._holder.communicate()
        if hasattr(self, "pid"):
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(self.pid).wait()


@contextlib.contextmanager
def hosts(
    folder: Path,
    count: int = 2,
    *,
    rate: float = 0.0,
    own: Sequence[str | Path] = (),
    second_network: bool = False,
) -> Iterator[list[Host]]:
    """Makes hosts on one network, named `host1` and so on, and removes them with all of their processes.

    Args:
        folder: an empty folder for what the hosts do not share.
        count: how many hosts.
        rate: bits a second that each can send and receive; 0 for any number.
        own: folders that each host has for itself, empty at first, as if each had a disk of its own there.
        second_network: whether the hosts have another network too, on `eth1`, which has no names.

    Raises:
        HostsNotPermitted: this machine or user cannot have them.
    """
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        raise HostsNotPermitted(f"these programs are missing: {', '.join(missing)}")
    if os.geteuid():
        raise HostsNotPermitted("only root can make hosts")
    made = []
    for number in range(1, count + 1):
        made.append(Host(folder / f"host{number}", number, f"host{number}"))
        made[-1].folder.mkdir(parents=True)
    if not ssh_missing():
        _write_ssh_settings(folder, made)
    # All are killed before the first is waited for: the kernel takes a second to remove a host.
    with contextlib.ExitStack() as stack, contextlib.ExitStack() as kills:
        switch = stack.enter_context(_Namespaces())
        switch.run("ip", "link", "add", "switch", "type", "bridge")
        switch.run("ip", "link", "set", "switch", "up")
        if second_network:
            switch.run("ip", "link", "add", "second", "type", "bridge")
            switch.run("ip", "link", "set", "second", "up")
        for host in made:
            host._switch = switch
            host._space = stack.enter_context(_Namespaces(_script(host, made, own)))
            kills.callback(host._space.kill)
            _connect(host, switch)
            if second_network:
                _connect_second(host, switch)
            host.limit(rate)
        yield made


def processes_on_hosts(folder: Path, *words: str) -> dict[int, str]:
    """The processes with these words in their command lines on the hosts that `hosts` has made in a folder.

    Other tests that run at the same time have hosts of their own.
    """
    files = {file.stat().st_ino for file in folder.glob("host*/hosts")}  # each host's /etc/hosts
    processes = {}
    for pid, command in processes_with(*words).items():
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/root/etc/hosts").stat().st_ino in files:
                processes[pid] = command
    return processes


def ssh_missing() -> str:
    """Why hosts can have no SSH server here; "" if they can."""
    if not _sshd():
        return "sshd is not installed"
    return "" if shutil.which("ssh") and shutil.which("ssh-keygen") else "no SSH client is installed"


def _sshd() -> str:
    """The full path of `sshd`, by which it must be started; "" if it is not installed."""
    return shutil.which("sshd", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"])) or ""


def _script(host: Host, made: list[Host], own: Sequence[str | Path]) -> str:
    """The script that the shell of a host runs first."""
    names = host.folder / "hosts"
    lines = ["127.0.0.1 localhost", "::1 localhost", *(f"{peer.address} {peer.name}" for peer in made)]
    names.write_text("".join(f"{line}\n" for line in lines))
    home = Path("~/.ssh").expanduser()
    folders = [*_FOLDERS, *own, *([home] if home.exists() else [])]
    script = [f"echo {host.name} >/proc/sys/kernel/hostname", f"mount --bind '{names}' /etc/hosts"]
    script += [f"mount -t tmpfs tmpfs '{path}'" for path in folders]
    script += ["mkdir /run/sshd"]  # sshd needs it
    if (host.folder / "ssh").exists():
        script += [f"mount --bind '{host.folder / 'ssh'}' /etc/ssh"]
    return "\n".join(script)


def _connect(host: Host, switch: _Namespaces) -> None:
    """Joins a host to the switch."""
    device = host._device
    switch.run(
        "ip", "link", "add", device, "type", "veth", "peer", "name", "eth0", "netns", str(host._space.pid)
    )
    switch.run("ip", "link", "set", device, "master", "switch", "up")
    host._space.run("ip", "address", "add", f"{host.address}/24", "dev", "eth0")
    host._space.run("ip", "address", "add", f"{host.address6}/64", "dev", "eth0", "nodad", check=False)
    host._space.run("ip", "link", "set", "eth0", "up")


def _connect_second(host: Host, switch: _Namespaces) -> None:
    """Joins a host to the second network."""
    device, inside = f"{host._device}b", str(host._space.pid)
    switch.run("ip", "link", "add", device, "type", "veth", "peer", "name", "eth1", "netns", inside)
    switch.run("ip", "link", "set", device, "master", "second", "up")
    host._space.run("ip", "address", "add", f"{host.second}/24", "dev", "eth1")
    host._space.run("ip", "link", "set", "eth1", "up")


def _write_ssh_settings(folder: Path, made: list[Host]) -> None:
    """Makes a key for each host and one for their users, and makes all of them known to all hosts."""
    client = folder / "client_key"
    _make_key(client)
    known = []
    for host in made:
        place = host.folder / "ssh"
        place.mkdir()
        _make_key(place / "host_key")
        public = " ".join((place / "host_key.pub").read_text().split()[:2])
        known.append(f"{host.name},{host.address},{host.address6} {public}\n")
    for host in made:
        place = host.folder / "ssh"
        shutil.copy(client, place / "client_key")
        shutil.copy(f"{client}.pub", place / "authorized_keys")
        (place / "ssh_known_hosts").write_text("".join(known))
        (place / "sshd_config").write_text(_SSH_SERVER)
        (place / "ssh_config").write_text(_SSH_CLIENT)


def _make_key(path: Path) -> None:
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
