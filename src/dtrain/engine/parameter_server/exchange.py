"""The messages between a worker and the servers: changes to each server, new weights back from each.

The servers apply all changes of one worker's step under a lock, before those of the next. So an optimizer's
moments, its counter and the weights always belong to the same update. No model code here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from dtrain.engine.parameter_server.packing import Packing
from dtrain.engine.variables.split_variables import parts_of


class Servers:
    """The lock and the clock of one strategy's servers.

    Args:
        home: the device of the server that holds the lock and the clock.

    Attributes:
        home: as given.
        lock: a `tf.CriticalSection` that every read and update enters.
        clock: a variable with the number of updates that the servers have applied, int64.
    """

    def __init__(self, home: str) -> None:
        self.home = home
        with tf.device(home):
            self.lock = tf.CriticalSection(shared_name=f"dtrain/servers/{next(_numbers)}")
            self.clock = tf.Variable(0, dtype=tf.int64, trainable=False, name="dtrain_clock")

    def locked(self, update: Callable[[], Any]) -> None:
        """Runs `update` under the lock: no other worker's update runs meanwhile; for use in a graph."""

        def run() -> tf.Tensor:
            with tf.control_dependencies(_effects(update)):
                return tf.constant(0)

        with tf.device(self.home):
            self.lock.execute(run)


class Exchange:
    """Reads and updates a fixed list of variables on the servers.

    Args:
        servers: the lock and the clock.
        variables: Keras or TensorFlow variables of fully defined shapes, each on a server.
    """

    def __init__(self, servers: Servers, variables: Sequence[Any]) -> None:
        self._servers = servers
        self._parts = [len(parts_of(variable)) for variable in variables]
        # The clock travels in the same message as its server's weights.
        self._variables = [*(part for v in variables for part in parts_of(v)), servers.clock]
        self._groups: dict[str, list[int]] = {}
        for i, variable in enumerate(self._variables):
            self._groups.setdefault(variable.device, []).append(i)
        self._packings = {
            device: Packing([_spec(self._variables[i]) for i in members])
            for device, members in self._groups.items()
        }

    def read(self) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Reads all variables and the clock under the lock, so that all values belong to the same update.

        Returns:
            The variables' values on the worker, and the clock.
        """
        return self._received(self._locked(self._read))

    def update(
        self, arrived: Sequence[tf.Tensor], update: Callable[[], None], *, counts: bool
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Updates the variables on the servers, and reads the new values.

        Args:
            arrived: the tensors on the servers that the update uses.
            update: assigns to variables.
            counts: whether to increment the clock.

        Returns:
            The variables' values and the clock after the update.
        """

        def work() -> list[list[tf.Tensor]]:
            def change() -> None:
                update()
                if counts:
                    self._servers.clock.assign_add(1)

            with tf.control_dependencies([tf.group(_effects(change))]):
                return self._read()

        # Take the lock only after all tensors have arrived, so that it is not held during a transfer.
        with tf.device(self._servers.home):
            all_there = tf.group(list(arrived))
        with tf.control_dependencies([all_there]):
            flats = self._locked(work)
        return self._received(flats)

    def _locked(self, work: Callable[[], list[list[tf.Tensor]]]) -> list[list[tf.Tensor]]:
        """Runs `work` under the lock, and returns the tensors that it reads, each on its server.

        They are not returned as the critical section's result: then all would pass through the lock's server.
        """
        results: list[list[tf.Tensor]] = []

        def run() -> tf.Tensor:
            results.extend(work())
            with tf.control_dependencies([tensor for flats in results for tensor in flats]):
                return tf.constant(0)

        with tf.device(self._servers.home):
            self._servers.lock.execute(run)
        return results

    def _read(self) -> list[list[tf.Tensor]]:
        flats = []
        for device, members in self._groups.items():
            with tf.device(device):
                flats.append(self._packings[device].pack([self._variables[i].read_value() for i in members]))
        return flats

    def _received(self, flats: list[list[tf.Tensor]]) -> tuple[list[tf.Tensor], tf.Tensor]:
        values: list[Any] = [None] * len(self._variables)
        for (device, members), sent in zip(self._groups.items(), flats, strict=True):
            for i, value in zip(members, self._packings[device].unpack(sent), strict=True):
                values[i] = value
        rest = iter(values)
        whole = [_joined([next(rest) for _ in range(count)]) for count in self._parts]
        return whole, values[-1]

    @staticmethod
    def send(pushed: Sequence[tuple[str, tf.Tensor]]) -> list[Any]:
        """Copies tensors to their devices, packed into few messages.

        Args:
            pushed: pairs of a device and the tensor to send to it.
        """
        arrived: list[Any] = [None] * len(pushed)
        by_device: dict[str, list[int]] = {}
        for i, (device, _) in enumerate(pushed):
            by_device.setdefault(device, []).append(i)
        for device, members in by_device.items():
            packing = Packing([tf.TensorSpec(pushed[i][1].shape, pushed[i][1].dtype) for i in members])
            flats = packing.pack([pushed[i][1] for i in members])
            with tf.device(device):
                parts = packing.unpack([tf.identity(flat) for flat in flats])
            for i, part in zip(members, parts, strict=True):
                arrived[i] = part
        return arrived


_numbers = itertools.count()


def _effects(function: Callable[[], Any]) -> list[tf.Operation]:
    """Calls a function, and returns the stateful operations that it added to the graph."""
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    function()
    return [op for op in graph.get_operations()[before:] if op.op_def.is_stateful]


def _joined(parts: list[tf.Tensor]) -> tf.Tensor:
    return parts[0] if len(parts) == 1 else tf.concat(parts, axis=0)


def _spec(variable: Any) -> tf.TensorSpec:
    return tf.TensorSpec(variable.shape, variable.dtype)
