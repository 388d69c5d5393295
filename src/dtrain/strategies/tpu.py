"""`TPUStrategy`: Google's TPUs. Finds and initialises the system, then leaves the work to TensorFlow's class.

It is kept thin: it could be tried here only where there is no TPU.
"""

from __future__ import annotations

import inspect
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

from dtrain.cluster import settings
from dtrain.cluster.tpu import tpu_name
from dtrain.errors import ConfigurationError, TPUNotFoundError
from dtrain.log import logger
from dtrain.strategies import common
from dtrain.upstream import tensorflow as upstream_tf

_FALLBACKS = ("mirrored",)
_SAY_EVERY = 10.0  # seconds between lines on what is waited for

# What an HTTP/2 client says first, with empty settings; a server answers with a frame of this type.
_HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
_HTTP2_SETTINGS = 4

Found = TypeVar("Found")


class TPUStrategy(tf.distribute.TPUStrategy):  # type: ignore[misc]
    """Synchronous training on TPU cores.

    Args:
        tpu_cluster_resolver: a `tf.distribute.cluster_resolver.TPUClusterResolver`; None makes one.
        experimental_device_assignment: as TensorFlow's.
        experimental_spmd_xla_partitioning: as TensorFlow's.
        tpu: the TPU's name or address, or "local"; None takes what the program has initialised already, or
            what the environment names.
        fallback: "mirrored" makes a `MirroredStrategy` where there is no TPU, and says so; None raises.
        timeout: seconds to look for the TPU; None as for a missing peer. Once it answers, TensorFlow's own
            limits hold.
        memory_growth: let the GPUs of the fallback take memory as it is needed.

    Raises:
        TPUNotFoundError: no TPU was found, reached or initialised in time.
        ConfigurationError: both a resolver and a name were given, or an unknown fallback.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Makes the object, which may be the fallback's: then Python does not call `__init__`."""
        fallback = kwargs.get("fallback")
        if fallback is None:
            return super().__new__(cls)
        if fallback not in _FALLBACKS:
            raise ConfigurationError(
                f"TPUStrategy has no fallback {fallback!r}.", hint=f"one of {', '.join(_FALLBACKS)}, or None"
            )
        memory_growth = kwargs.get("memory_growth", True)
        # Before the search, which starts TensorFlow's devices: the fallback may need several logical CPUs.
        common.prepare(memory_growth=memory_growth)
        try:
            _find(
                args[0] if args else kwargs.get("tpu_cluster_resolver"),
                kwargs.get("tpu"),
                kwargs.get("timeout"),
            )
        except TPUNotFoundError as error:
            from dtrain.strategies.mirrored import MirroredStrategy

            logger.warning(
                "%s Training on MirroredStrategy instead: fallback=%r was set.", error.message, fallback
            )
            return MirroredStrategy(memory_growth=memory_growth)
        return super().__new__(cls)

    def __init__(
        self,
        tpu_cluster_resolver: Any = None,
        experimental_device_assignment: Any = None,
        experimental_spmd_xla_partitioning: bool = False,
        *,
        tpu: str | None = None,
        fallback: str | None = None,
        timeout: float | None = None,
        memory_growth: bool = True,
    ) -> None:
        common.prepare(memory_growth=memory_growth, logical_cpus=False)
        resolver = _find(tpu_cluster_resolver, tpu, timeout)
        super().__init__(resolver, experimental_device_assignment, experimental_spmd_xla_partitioning)
        # No `dtrain_layout`: on TPUs Keras and TensorFlow train as they are. What dtrain does on the way of
        # a step was never run on one, and numbers that nobody has seen are not promised.

    # What tools and `help` should show of the class; they ask `__new__` first.
    __new__.__signature__ = inspect.signature(__init__)  # type: ignore[attr-defined]


def _find(resolver: Any, tpu: str | None, timeout: float | None) -> Any:
    """A resolver whose TPU system is initialised; one that was already is not initialised again."""
    if resolver is not None and tpu is not None:
        raise ConfigurationError(
            f"TPUStrategy was given a resolver and tpu={tpu!r}; they name the TPU twice.",
            hint="give one of them",
        )
    limit = settings.peer_timeout() if timeout is None else timeout
    deadline = time.monotonic() + limit
    name = _with_scheme(tpu if tpu is not None else _known_name())
    looked = f"the TPU of {type(resolver).__name__}" if resolver is not None else _looked_for(tpu, name)
    try:
        if resolver is None:
            resolver = _within(limit, lambda: tf.distribute.cluster_resolver.TPUClusterResolver(tpu=name))
        if upstream_tf.tpu_is_initialised(resolver):
            return resolver
        addresses = _within(limit, lambda: _addresses(resolver))
        for address in addresses:
            _wait_for(address, deadline, limit)
        if addresses:
            # Not in another thread: it sets this one's default device.
            tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
    except (tf.errors.OpError, OSError, ValueError, RuntimeError, ImportError) as error:
        raise TPUNotFoundError(
            f"No TPU was found. Looked for {looked}: {_first_line(error)}",
            hint=(
                "name it: dtrain.TPUStrategy(tpu='NAME') or TPU_NAME=NAME; on a TPU VM use tpu='local'; "
                "fallback='mirrored' trains on this machine's other devices instead"
            ),
        ) from error
    return resolver


def _known_name() -> str:
    """What the program has initialised, else what the environment names; "" leaves it to TensorFlow."""
    initialised = upstream_tf.initialised_tpus()
    return initialised[-1] if initialised else tpu_name() or ""


def _with_scheme(name: str) -> str:
    """Colab gives an address without its scheme, which TensorFlow would take for a name."""
    return f"grpc://{name}" if ":" in name and "://" not in name else name


def _looked_for(tpu: str | None, name: str) -> str:
    if tpu is not None:
        return f"the TPU {tpu!r}"
    return (
        f"the TPU {name!r}, named by the environment"
        if name
        else "a TPU that the environment names (TPU_NAME)"
    )


def _addresses(resolver: Any) -> list[str]:
    """Where the TPU's workers serve, as `host:port`; none for a local TPU."""
    return [address for job in resolver.cluster_spec().as_dict().values() for address in job]


def _within(limit: float, work: Callable[[], Found]) -> Found:
    """What `work` returns or raises, within `limit` seconds: its requests over the network have no limit."""
    found: list[Found] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            found.append(work())
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="dtrain-find-tpu", daemon=True)
    thread.start()
    thread.join(min(limit, threading.TIMEOUT_MAX))  # a launcher's job has no limit
    if found:
        return found[0]
    raise failed[0] if failed else TimeoutError(f"no answer in {limit:g} s")


def _wait_for(address: str, deadline: float, limit: float) -> None:
    """Returns when something speaks gRPC there.

    TensorFlow would wait for it in C++ for ever, with all Python threads stopped.

    Raises:
        TimeoutError: nothing did in time.
    """
    say_next = time.monotonic() + _SAY_EVERY
    while True:
        why = _silence(address, min(2.0, max(0.1, deadline - time.monotonic())))
        if why is None:
            return
        now = time.monotonic()
        if now >= deadline:
            raise TimeoutError(f"nothing serves at {address} ({why}); waited {limit:g} s")
        if now >= say_next:
            say_next = now + _SAY_EVERY
            sys.stderr.write(
                f"dtrain: waiting for the TPU at {address}; giving up in {deadline - now:.0f} s\n"
            )
        time.sleep(min(0.5, deadline - now))


def _silence(address: str, seconds: float) -> str | None:
    """Why an address does not speak gRPC, or None if it does."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=seconds) as sock:
            sock.sendall(_HTTP2_HELLO)
            frame = b""
            while len(frame) < 4:
                chunk = sock.recv(64)
                if not chunk:
                    return "it closed the connection"
                frame += chunk
    except TimeoutError:
        return "no answer"
    except OSError as error:
        return error.strerror or str(error)
    return None if frame[3] == _HTTP2_SETTINGS else "it does not speak gRPC"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    text = lines[0] if len(lines[0]) <= 200 else f"{lines[0][:200]}..."
    return text if isinstance(error, TimeoutError) else f"{type(error).__name__}: {text}"
