"""How tensors and batches are put together for a message and for a block, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from dtrain.engine.parameter_server.block_batches import BlockBuffer, BlockData, BlockReader, as_batch
from dtrain.engine.parameter_server.block_sizes import BlockSizes, Pace
from dtrain.engine.parameter_server.packing import Packing
from dtrain.interfaces.replica_layout import ServerLayout

WORDS = ("float32", "int32", "uint32", "float64", "int64", "uint64")
OTHERS = ("bool", "float16", "bfloat16", "int8", "complex64")


def bits(dtype: tf.DType, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Any bits at all of a dtype, those of NaNs and of denormal numbers among them."""
    kind = np.dtype(dtype.as_numpy_dtype)
    count = int(np.prod(shape))
    if dtype == tf.bool:
        return rng.integers(0, 2, shape).astype(bool)
    raw = rng.integers(0, 256, count * kind.itemsize, dtype=np.uint8).view(kind)
    if dtype == tf.float32 and count > 3:
        raw[:4] = np.array([0x7FA00000, 0xFFC00001, 1, 0x80000000], np.uint32).view(np.float32)
    return raw.reshape(shape)


def same_bits(found: Any, expected: np.ndarray) -> bool:
    array = np.asarray(found.numpy() if isinstance(found, tf.Tensor) else found)
    return (
        array.dtype == expected.dtype
        and array.shape == expected.shape
        and array.tobytes() == expected.tobytes()
    )


@pytest.mark.parametrize("names", [WORDS, OTHERS, ("int64", "int32"), (*WORDS, *OTHERS), ("float32",)])
def test_what_is_packed_comes_out_to_the_bit(names: tuple[str, ...]) -> None:
    rng = np.random.default_rng(0)
    shapes: list[tuple[int, ...]] = [(), (5,), (0,), (2, 3, 2)]
    arrays = [bits(tf.as_dtype(name), shape, rng) for name in names for shape in shapes]
    specs = [tf.TensorSpec(array.shape, array.dtype) for array in arrays]
    packing = Packing(specs)

    @tf.function
    def there(tensors: list[Any]) -> list[Any]:
        return packing.pack(tensors)

    @tf.function
    def back(flats: list[Any]) -> list[Any]:
        return packing.unpack(flats)

    flats = there([tf.constant(array) for array in arrays])
    assert [(f.shape, f.dtype) for f in flats] == [(s.shape, s.dtype) for s in packing.flat_specs]
    assert sum(name in WORDS for name in names) == 0 or len(flats) <= 1 + sum(n in OTHERS for n in names)
    for found in (back(flats), packing.unpack(flats)):
        assert all(same_bits(one, array) for one, array in zip(found, arrays, strict=True))


def test_text_is_packed_too() -> None:
    packing = Packing([tf.TensorSpec([2], tf.string), tf.TensorSpec([], tf.float32)])
    flats = packing.pack([tf.constant(["a", "bc"]), tf.constant(1.5)])
    text, number = packing.unpack(flats)
    assert text.numpy().tolist() == [b"a", b"bc"] and float(number) == 1.5


def split(data: BlockData, leaf: int = 0) -> list[list[Any]]:
    """The batches of one leaf of a block."""
    ends = np.cumsum(data.sizes[leaf])
    return [part.tolist() for part in np.split(data.values[leaf].numpy(), ends[:-1])]


def test_blocks_are_read_until_the_data_end() -> None:
    x = np.arange(22, dtype="float32").reshape(11, 2)
    dataset = tf.data.Dataset.from_tensor_slices({"x": x, "y": np.arange(11)}).batch(3)
    assert BlockReader.reads(dataset.element_spec)
    reader, iterator = BlockReader(dataset.element_spec), iter(dataset)
    first, second = reader.read(iterator, 3), reader.read(iterator, 3)
    assert first is not None and second is not None
    assert (first.count, second.count) == (3, 1)
    assert first.sizes.tolist() == [[3, 3, 3], [3, 3, 3]]
    assert second.sizes.tolist() == [[2], [2]]
    assert split(first, 1) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    np.testing.assert_array_equal(np.concatenate([first.values[0], second.values[0]]), x)
    assert reader.read(iterator, 3) is None


def test_an_error_of_the_data_is_not_their_end() -> None:
    def broken() -> Iterator[Any]:
        yield np.zeros((2, 1), "float32")
        raise ValueError("of the data")

    dataset = tf.data.Dataset.from_generator(broken, output_signature=tf.TensorSpec([None, 1]))
    with pytest.raises(tf.errors.OpError, match="of the data"):
        BlockReader(dataset.element_spec).read(iter(dataset), 4)


@pytest.mark.parametrize(
    ("spec", "reads"),
    [
        (tf.TensorSpec([None, 3]), True),
        ((tf.TensorSpec([4, 3]), None), True),
        (tf.TensorSpec([None, None]), False),
        (tf.TensorSpec([]), False),
        (tf.RaggedTensorSpec([None, None], tf.float32), False),
        (tf.SparseTensorSpec([None, 3], tf.float32), False),
        (None, False),
    ],
)
def test_which_data_are_read_whole(spec: Any, reads: bool) -> None:
    assert BlockReader.reads(spec) is reads


def test_batches_of_one_kind_are_concatenated() -> None:
    batches = BlockBuffer()
    for size in (4, 4, 1):
        batch = (np.full((size, 2), size, "float32"), None, np.arange(size))
        assert batches.fits(as_batch(batch, None))
        batches.add(as_batch(batch, None))
    assert batches.bytes == 9 * (2 * 4 + 8)
    assert not batches.fits(as_batch((np.zeros((4, 3), "float32"), None, np.arange(4)), None))
    assert not batches.fits(as_batch((np.zeros((4, 2), "float32"), np.arange(4), np.arange(4)), None))
    data = batches.take()
    assert (data.count, data.many, len(batches)) == (3, True, 0)
    assert data.sizes.tolist() == [[4, 4, 1], [4, 4, 1]]
    assert split(data, 1) == [[0, 1, 2, 3], [0, 1, 2, 3], [0]]
    assert data.spec[0].shape.as_list() == [None, 2]


def test_what_cannot_be_concatenated_goes_alone() -> None:
    batches = BlockBuffer()
    ragged = tf.ragged.constant([[1.0], [2.0, 3.0]])
    batches.add(as_batch((ragged, tf.zeros([2])), None))
    assert not batches.fits(as_batch((ragged, tf.zeros([2])), None))
    data = batches.take()
    assert (data.count, data.many, data.sizes.shape) == (1, False, (0, 0))
    assert data.values[0] is ragged
    batches.add(as_batch((np.zeros((2, 1)),), None, alone=True))
    assert batches.take().many is False


def test_the_pace_is_learnt_from_second_runs() -> None:
    pace = Pace()
    functions = [object(), object()]
    pace.note(functions[0], 0, 9.0, 1)
    pace.note(functions[0], 1, 9.0, 1)
    pace.note(functions[1], 0, 9.0, 1)
    assert pace.seconds is None
    pace.note(functions[0], 1, 0.5, 5)
    assert pace.seconds == pytest.approx(0.1)


def known_pace(step_seconds: list[float]) -> Pace:
    """A pace that knows how long a step of each worker takes."""
    pace, function = Pace(), object()
    for worker, seconds in enumerate(step_seconds):
        for _ in range(2):
            pace.note(function, worker, 500 * seconds, 500)
    return pace


def sizes_with(pace: Pace, workers: int, max_staleness: int | None = None) -> BlockSizes:
    program: Any = SimpleNamespace(setting=SimpleNamespace(accumulation=1, overlaps=False))
    layout = ServerLayout(workers=workers, max_staleness=max_staleness, servers=None)
    return BlockSizes(program, layout, pace, None)


def sizes_of_an_epoch(step_seconds: list[float], steps: int, *, most: int = 256, **options: Any) -> list[int]:
    """How many steps the blocks of an epoch have, once a step of each worker is known to take so long.

    Each size is asked for twice, and once more at the end, as where the end is not known before it is read.
    """
    sizes = sizes_with(known_pace(step_seconds), len(step_seconds), **options)
    found: list[int] = []
    while sum(found) < steps:
        left = steps - sum(found)
        found.append(min(left, sizes.steps(left, 0, most)))
        assert min(left, sizes.steps(left, 0, most)) == found[-1]
    assert sizes.steps(0, 0) >= 1
    return found


def test_equally_fast_workers_get_equal_blocks_and_few() -> None:
    assert sizes_of_an_epoch([0.001] * 4, 240) == [60] * 4
    assert sizes_of_an_epoch([0.005] * 4, 600) == [75] * 8  # a block takes 0.4 s at most
    assert sizes_of_an_epoch([0.001] * 4, 2400) == [200] * 12  # and has 256 steps at most
    assert sizes_of_an_epoch([1.0, 1.1], 5) == [1] * 5
    assert sizes_of_an_epoch([0.02, 0.025], 9) == [5, 4]
    assert sizes_of_an_epoch([0.001] * 4, 65) == [17, 16, 16, 16]
    assert sizes_of_an_epoch([0.001] * 4, 63) == [21] * 3  # a smaller block's loop is not unrolled
    assert sizes_of_an_epoch([0.001] * 4, 31) == [31]
    assert sizes_of_an_epoch([0.02] * 4, 40, most=7) == [5] * 8
    assert sizes_of_an_epoch([0.012] * 4, 44, max_staleness=30) == [6, 6, 5, 5, 6, 6, 5, 5]
    assert max(sizes_of_an_epoch([0.001] * 4, 440, max_staleness=50)) * 3 <= 50
    assert sizes_of_an_epoch([0.001] * 4, 100, max_staleness=0) == [100]  # one block after another
    for steps in (17, 241, 601):
        blocks = sizes_of_an_epoch([0.001, 0.0012, 0.001, 0.0014], steps)
        assert sum(blocks) == steps
        assert min(blocks) >= 16
        assert len(blocks) <= 4


def test_only_known_and_equal_workers_get_equal_blocks() -> None:
    pace = known_pace([0.001] * 3)
    sizes = sizes_with(pace, 4)
    assert sizes.steps(240, 0) == 30  # nothing is known of the fourth
    function = object()
    pace.note(function, 3, 1.0, 100)  # its first run, with preparation
    pace.note(function, 3, 0.1, 100)
    assert sizes.steps(240, 0) == 60
    pace.note(function, 3, 0.04, 10)  # four times as slow for a tenth of the steps that are averaged
    assert sizes.steps(180, 0) == 60
    pace.note(function, 3, 0.4, 100)
    assert sizes.steps(120, 0) == 16
    pace.note(function, 3, 0.1, 100)
    assert sizes.steps(104, 0) == 26  # a new round
    pace.forget(3)
    assert not pace.even(4)
    pace.note(function, 3, 9.0, 100)  # the new process prepares the function
    assert not pace.even(4)


def test_the_last_blocks_of_unequal_workers_are_small_but_unrolled() -> None:
    uneven = [0.001, 0.001, 0.0025, 0.001]
    of_fast = sizes_of_an_epoch(uneven, 600)
    assert of_fast[:2] == [75, 66]
    for steps in (240, 600, 601, 17, 31, 32):
        blocks = sizes_of_an_epoch(uneven, steps)
        assert sum(blocks) == steps
        assert min(blocks) >= 16
        assert blocks[-1] < 32
    assert sizes_of_an_epoch([0.001], 600)[:2] == [100, 100]
    assert sizes_of_an_epoch([0.02, 0.05, 0.02, 0.02], 40)[-8:] == [1] * 8  # slow steps: not unrolled
