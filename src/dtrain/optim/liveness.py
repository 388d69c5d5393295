"""How much memory the tensors of a graph take at most while it runs, found from their shapes alone.

It plays the executor's part: an operation's results live from when it starts until their last reader is done,
and an element-wise operation writes over an input that nobody else needs. What a kernel uses for itself while
it runs is not in a graph, and so not counted.
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
# Their result is their input's memory.
_VIEWS = _names(
    "Bitcast CheckNumerics EnsureShape ExpandDims Identity IdentityN PreventGradient ReadVariableOp Reshape "
    "Snapshot Squeeze StopGradient"
)
# They look at shapes only, which TensorFlow's graph optimizer makes constants.
_SHAPES = _names("Shape ShapeN Size Rank ZerosLike OnesLike BroadcastGradientArgs")
# They may write a result over an input of the same size.
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
    """The bytes of a tensor or a spec by its shape; 0 for handles and where the shape is not known."""
    if tensor.dtype in (tf.resource, tf.variant, tf.string) or not tensor.shape.is_fully_defined():
        return 0
    return int(tensor.shape.num_elements()) * int(tensor.dtype.size)


def peak_bytes(operations: Iterable[Any], *, wanted: Iterable[Any], apart: Iterable[Any] = ()) -> int:
    """The most bytes that live at one time while a graph runs, one operation after another.

    Args:
        operations: the graph's, in the order in which they were made.
        wanted: those that must run; what they do not need does not run.
        apart: tensors whose memory is counted elsewhere.
    """
    needed = ancestors(wanted)
    running = [op for op in operations if op in needed]
    run = _Run(
        readers=collections.Counter(name for op in running for name in _read(op)),
        apart=frozenset(viewed(apart)),
    )
    for op in _in_order(running):
        run.start(op)
        run.finish(op)
    return run.peak


def ancestors(operations: Iterable[Any]) -> set[Any]:
    """Operations, and all that must run before them."""
    found: set[Any] = set()
    waiting = list(operations)
    while waiting:
        op = waiting.pop()
        if op not in found:
            found.add(op)
            waiting.extend((*(tensor.op for tensor in op.inputs), *op.control_inputs))
    return found


def descendants(graph: Any, operations: Iterable[Any]) -> set[Any]:
    """What can run only after one of some operations of a graph; not these themselves."""
    followers: dict[Any, list[Any]] = collections.defaultdict(list)
    for op in graph.get_operations():
        for before in (*(tensor.op for tensor in op.inputs), *op.control_inputs):
            followers[before].append(op)
    found: set[Any] = set()
    waiting = list(operations)
    while waiting:
        for op in followers[waiting.pop()]:
            if op not in found:
                found.add(op)
                waiting.append(op)
    return found


def _in_order(operations: Sequence[Any]) -> Iterator[Any]:
    """Operations as an executor takes them in one thread: from each beginning, what is ready first."""
    known = set(operations)
    followers: dict[Any, list[Any]] = collections.defaultdict(list)
    waiting = {}
    for op in operations:
        before = {*(tensor.op for tensor in op.inputs), *op.control_inputs} & known
        waiting[op] = len(before)
        for each in before:
            followers[each].append(op)
    # A session feeds its inputs after it has begun with what needs none, such as reading the weights.
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
    """The names of tensors, each followed by those of the tensors whose memory it is a view of."""
    found = []
    for tensor in tensors:
        found.append(tensor.name)
        while tensor.op.type in _VIEWS and tensor.op.inputs:
            tensor = tensor.op.inputs[0]
            found.append(tensor.name)
    return found


def _read(op: Any) -> list[str]:
    """The tensors whose memory an operation reads."""
    if op.type in _SHAPES:
        return []
    inputs = op.inputs[:1] if op.type in _VIEWS and op.type != "IdentityN" else op.inputs
    return [tensor.name for tensor in inputs]


@dataclass
class _Buffer:
    """One piece of memory: its bytes, and how many operations still have to read it."""

    size: int
    readers: int = 0
    counted: bool = True


@dataclass
class _Run:
    """One run of a graph: which buffer each tensor lies in, and what lives."""

    readers: collections.Counter[str]
    apart: frozenset[str]
    buffers: dict[str, _Buffer] = field(default_factory=dict)
    live: int = 0
    peak: int = 0

    def start(self, op: Any) -> None:
        """The results of an operation come to life."""
        read = _read(op)
        for position, tensor in enumerate(op.outputs):
            buffer = self._place(op, position, tensor, read)
            buffer.readers += self.readers[tensor.name]
            self.buffers[tensor.name] = buffer
        self.peak = max(self.peak, self.live)

    def finish(self, op: Any) -> None:
        """What an operation was the last one to read is freed, and results that nobody reads."""
        read = _read(op)
        for name in read:
            self.buffers[name].readers -= 1
        for name in (*read, *(tensor.name for tensor in op.outputs)):
            buffer = self.buffers[name]
            if not buffer.readers and buffer.counted:
                buffer.counted = False
                self.live -= buffer.size

    def _place(self, op: Any, position: int, tensor: Any, read: Sequence[str]) -> _Buffer:
        """The buffer of a result: an input's, or a new one."""
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
