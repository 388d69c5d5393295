"""Computes the peak memory of a graph's tensors from their shapes alone, without running the graph.

It simulates the executor: the results of an operation live from its start until their last reader has
finished, and an element-wise operation overwrites an input that no other operation needs. The temporary
memory of kernels is not in a graph, and so not counted.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


LOOPS = _names("While StatelessWhile Enter RefEnter")
# Operations whose result shares the memory of their input.
_VIEWS = _names(
    "Bitcast CheckNumerics EnsureShape ExpandDims Identity IdentityN PreventGradient ReadVariableOp Reshape "
    "Snapshot Squeeze StopGradient"
)
# Operations that read only shapes, which TensorFlow's graph optimizer turns into constants.
_SHAPES = _names("Shape ShapeN Size Rank ZerosLike OnesLike BroadcastGradientArgs")
# Operations that may overwrite an input of the same size with their result.
_IN_PLACE = _names(
    "Abs Add AddN AddV2 BiasAdd BitwiseAnd BitwiseOr BitwiseXor Ceil ClipByValue Cos Div DivNoNan Elu "
    "EluGrad Erf Erfc Exp Expm1 Floor FloorDiv FloorMod Inv InvGrad LeakyRelu LeakyReluGrad Log Log1p "
    "LogSoftmax LogicalAnd LogicalNot LogicalOr Maximum Minimum Mul MulNoNan Neg Pow RealDiv Reciprocal "
    "ReciprocalGrad Relu Relu6 Relu6Grad ReluGrad Round Rsqrt RsqrtGrad Select SelectV2 Selu SeluGrad "
    "Sigmoid SigmoidGrad Sign Sin Softmax SoftmaxCrossEntropyWithLogits Softplus SoftplusGrad Softsign "
    "SoftsignGrad SparseSoftmaxCrossEntropyWithLogits Sqrt SqrtGrad Square SquaredDifference Sub Tan Tanh "
    "TanhGrad Xdivy Xlog1py Xlogy"
)


def tensor_bytes(tensor: Any) -> int:
    """The bytes of a tensor or a spec, from its shape; 0 for handles, strings and unknown shapes."""
    if tensor.dtype in (tf.resource, tf.variant, tf.string) or not tensor.shape.is_fully_defined():
        return 0
    return int(tensor.shape.num_elements()) * int(tensor.dtype.size)


def peak_bytes(operations: Iterable[Any], *, wanted: Iterable[Any], apart: Iterable[Any] = ()) -> int:
    """The peak number of bytes that live at one time while a graph runs one operation after another.

    Args:
        operations: the graph's operations, in the order in which they were made.
        wanted: the operations to run; only they and the operations that they need are counted.
        apart: tensors to leave out, because their memory is counted elsewhere.
    """
    needed = ancestors(wanted)
    running = [op for op in operations if op in needed]
    run = _Simulation(
        readers=collections.Counter(name for op in running for name in _read(op)),
        apart=frozenset(viewed(apart)),
    )
    for op in _in_order(running):
        run.start(op)
        run.finish(op)
    return run.peak


def ancestors(operations: Iterable[Any]) -> set[Any]:
    """The given operations, and all operations that must run before them."""
    reached: set[Any] = set()
    waiting = list(operations)
    while waiting:
        op = waiting.pop()
        if op not in reached:
            reached.add(op)
            waiting.extend((*(tensor.op for tensor in op.inputs), *op.control_inputs))
    return reached


def descendants(graph: Any, operations: Iterable[Any]) -> set[Any]:
    """The operations of a graph that can run only after one of the given operations, without these."""
    followers: dict[Any, list[Any]] = collections.defaultdict(list)
    for op in graph.get_operations():
        for before in (*(tensor.op for tensor in op.inputs), *op.control_inputs):
            followers[before].append(op)
    reached: set[Any] = set()
    waiting = list(operations)
    while waiting:
        for op in followers[waiting.pop()]:
            if op not in reached:
                reached.add(op)
                waiting.append(op)
    return reached


def _in_order(operations: Sequence[Any]) -> Iterator[Any]:
    """Operations in the order of an executor with one thread: from each root, what becomes ready first."""
    known = set(operations)
    followers: dict[Any, list[Any]] = collections.defaultdict(list)
    waiting = {}
    for op in operations:
        before = {*(tensor.op for tensor in op.inputs), *op.control_inputs} & known
        waiting[op] = len(before)
        for predecessor in before:
            followers[predecessor].append(op)
    # A session first runs operations that need no feed, such as reading weights, then feeds its inputs.
    beginnings = [op for op in operations if not waiting[op]]
    for first in sorted(beginnings, key=lambda op: op.type == "Placeholder"):
        ready = collections.deque([first])
        while ready:
            op = ready.popleft()
            yield op
            for follower in followers[op]:
                waiting[follower] -= 1
                if not waiting[follower]:
                    ready.append(follower)


def viewed(tensors: Iterable[Any]) -> list[str]:
    """The names of tensors, each followed by the names of the tensors whose memory it shares."""
    names = []
    for tensor in tensors:
        names.append(tensor.name)
        while tensor.op.type in _VIEWS and tensor.op.inputs:
            tensor = tensor.op.inputs[0]
            names.append(tensor.name)
    return names


def _read(op: Any) -> list[str]:
    """The tensors whose memory an operation reads."""
    if op.type in _SHAPES:
        return []
    inputs = op.inputs[:1] if op.type in _VIEWS and op.type != "IdentityN" else op.inputs
    return [tensor.name for tensor in inputs]


@dataclass
class _Buffer:
    """One piece of memory: its bytes, the number of reads to come, and whether it counts as live."""

    size: int
    readers: int = 0
    counted: bool = True


@dataclass
class _Simulation:
    """A simulated run of a graph: the buffer of each tensor, the live bytes, and their peak so far."""

    readers: collections.Counter[str]
    apart: frozenset[str]
    buffers: dict[str, _Buffer] = field(default_factory=dict)
    live: int = 0
    peak: int = 0

    def start(self, op: Any) -> None:
        """Allocates the results of an operation."""
        read = _read(op)
        for position, tensor in enumerate(op.outputs):
            buffer = self._place(op, position, tensor, read)
            buffer.readers += self.readers[tensor.name]
            self.buffers[tensor.name] = buffer
        self.peak = max(self.peak, self.live)

    def finish(self, op: Any) -> None:
        """Frees the inputs that no later operation reads, and results that no operation reads."""
        read = _read(op)
        for name in read:
            self.buffers[name].readers -= 1
        for name in (*read, *(tensor.name for tensor in op.outputs)):
            buffer = self.buffers[name]
            if not buffer.readers and buffer.counted:
                buffer.counted = False
                self.live -= buffer.size

    def _place(self, op: Any, position: int, tensor: Any, read: Sequence[str]) -> _Buffer:
        """The buffer of a result: the buffer of an input, or a new one."""
        if op.type in _VIEWS and len(read) > position:
            return self.buffers[read[position]]
        if tensor.name in self.apart or op.type in ("Placeholder", "Const", "VarHandleOp"):
            return _Buffer(0, counted=False)
        size = tensor_bytes(tensor)
        if op.type in _IN_PLACE:
            for name in read:
                buffer = self.buffers[name]
                if buffer.counted and buffer.size == size and buffer.readers == read.count(name):
                    return buffer
        self.live += size
        return _Buffer(size)
