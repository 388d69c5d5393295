"""`TPUStrategy`: finds and initialises a Google TPU, and leaves everything else to TensorFlow's class.

Only its behaviour without a TPU was tested, so it adds as little as possible.
"""

from __future__ import annotations

import inspect
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

from dtrain.base.clock import REAL, Deadline
from dtrain.base.log import logger
from dtrain.environments import settings
from dtrain.environments.tpu_name import tpu_name
from dtrain.errors import ConfigurationError, TPUNotFoundError
from dtrain.strategies import common
from dtrain.upstream import servers

_FALLBACKS = ("mirrored",)
_SAY_EVERY = 10.0  # seconds between two messages while waiting

# The first bytes of an HTTP/2 client, with empty settings; a server answers with a frame of this type.
_HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
_HTTP2_SETTINGS = 4

Found = TypeVar("Found")


class TPUStrategy(tf.distribute.TPUStrategy):  # type: ignore[misc]
    """Synchronous training on TPU cores.

    Args:
        tpu_cluster_resolver: a `tf.distribute.cluster_resolver.TPUClusterResolver`; None creates one.
        experimental_device_assignment: as in TensorFlow.
        experimental_spmd_xla_partitioning: as in TensorFlow.
        tpu: the TPU's name or address, or "local"; None uses the TPU that the program has initialised last,
            or else the one that the environment names.
        fallback: "mirrored" creates a `MirroredStrategy` if there is no TPU, with a warning; None raises.
        timeout: seconds to look for the TPU; None uses `DTRAIN_PEER_TIMEOUT` or its default. After the TPU
            has answered, TensorFlow's own limits apply.
        memory_growth: whether the fallback's GPUs allocate memory as needed instead of all at once.

    Raises:
        TPUNotFoundError: no TPU was found, reached or initialised in time, and there is no fallback.
        ConfigurationError: both a resolver and a name were given, or the fallback is not known.

    Example:
        ```python
        strategy = dtrain.TPUStrategy(fallback="mirrored")  # without a TPU, the devices of this machine
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        model.fit(np.ones((64, 4)), np.ones((64, 1)), verbose=0)
        ```
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Creates the object; if it is the fallback's strategy, Python does not call `__init__`."""
        fallback = kwargs.get("fallback")
        if fallback is None:
            return super().__new__(cls)
        if fallback not in _FALLBACKS:
            raise ConfigurationError(
                f"TPUStrategy has no fallback {fallback!r}.", hint=f"one of {', '.join(_FALLBACKS)}, or None"
            )
        memory_growth = kwargs.get("memory_growth", True)
        # Prepare before the search, which starts TensorFlow's devices: the fallback may need logical CPUs.
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
        # No `dtrain_managed`: on TPUs, Keras and TensorFlow train without dtrain's engine, because the engine
        # was never tested on a TPU.

    # `help` and other tools show the signature of `__new__`, so give it that of `__init__`.
    __new__.__signature__ = inspect.signature(__init__)  # type: ignore[attr-defined]


def _find(resolver: Any, tpu: str | None, timeout: float | None) -> Any:
    """Finds the TPU, and initialises its system if this process has not done so; returns its resolver."""
    if resolver is not None and tpu is not None:
        raise ConfigurationError(
            f"TPUStrategy was given a resolver and tpu={tpu!r}; they name the TPU twice.",
            hint="give one of them",
        )
    limit = settings.peer_timeout() if timeout is None else timeout
    deadline = REAL.deadline(limit)
    name = _with_scheme(tpu if tpu is not None else _known_name())
    looked = f"the TPU of {type(resolver).__name__}" if resolver is not None else _looked_for(tpu, name)
    try:
        if resolver is None:
            resolver = _within(limit, lambda: tf.distribute.cluster_resolver.TPUClusterResolver(tpu=name))
        if servers.tpu_is_initialised(resolver):
            return resolver
        addresses = _within(limit, lambda: _addresses(resolver))
        for address in addresses:
            wait_for(address, deadline, limit)
        if addresses:
            # This must run in the calling thread, because it sets the thread's default device.
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
    """The TPU that the program initialised last, or the one in the environment; "" lets TensorFlow search."""
    initialised = servers.initialised_tpus()
    return initialised[-1] if initialised else tpu_name() or ""


def _with_scheme(name: str) -> str:
    """Adds `grpc://` to an address without a scheme (Colab's), which TensorFlow would take for a name."""
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
    """The addresses of the TPU's workers, as `host:port`; an empty list for a local TPU."""
    return [address for job in resolver.cluster_spec().as_dict().values() for address in job]


def _within(limit: float, work: Callable[[], Found]) -> Found:
    """Returns or raises what `work` does, within `limit` seconds, because its network requests have no limit.

    Raises:
        TimeoutError: `work` did not end in time; its thread keeps running.
    """
    results: list[Found] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="dtrain-find-tpu", daemon=True)
    thread.start()
    thread.join(min(limit, threading.TIMEOUT_MAX))  # a launcher's job has no limit
    if results:
        return results[0]
    raise failed[0] if failed else TimeoutError(f"no answer in {limit:g} s")


def wait_for(address: str, deadline: Deadline, limit: float) -> None:
    """Waits until a gRPC server answers at `address`, on the deadline's clock.

    Without this, TensorFlow would wait for it in C++ without a limit, with all Python threads blocked.

    Raises:
        TimeoutError: no gRPC server answered until `deadline`.
    """
    clock = deadline.clock
    say_next = clock.deadline(_SAY_EVERY)
    while True:
        why = _silence(address, min(2.0, max(0.1, deadline.left())))
        if why is None:
            return
        if deadline.passed():
            raise TimeoutError(f"nothing serves at {address} ({why}); waited {limit:g} s")
        if say_next.passed():
            say_next = clock.deadline(_SAY_EVERY)
            sys.stderr.write(
                f"dtrain: waiting for the TPU at {address}; giving up in {deadline.left():.0f} s\n"
            )
        clock.sleep(min(0.5, deadline.left()))


def _silence(address: str, seconds: float) -> str | None:
    """Why no gRPC server answers at an address; None if one does."""
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
