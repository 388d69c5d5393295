"""Loads pickles of NumPy arrays, containers and text safely, and no other pickles; and writes such pickles.

A pickle can call any function of the process that loads it. Here it can call only functions that build
arrays.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Iterator
from typing import Any

import numpy as np


def load_arrays(raw: bytes) -> Any:
    """Load a pickle; text that Python 2 wrote is returned as bytes.

    Args:
        raw: the pickle, of any protocol, written by Python 2 or 3.

    Raises:
        pickle.UnpicklingError: the pickle names something that no array needs, or would take memory or time
            out of proportion to its size.
        Exception: any other error that `pickle.loads` raises for damaged bytes.
    """
    _check_growth(raw)
    return _ArrayUnpickler(io.BytesIO(raw), encoding="bytes").load()


def dump_arrays(value: Any) -> bytes:
    """Pickle arrays, numbers, text and containers of them, as `load_arrays` loads them.

    An object that occurs several times is written each time: `load_arrays` refuses references to tuples.

    Raises:
        ValueError: a container contains itself.
    """
    file = io.BytesIO()
    pickler = pickle.Pickler(file)
    pickler.fast = True  # without references
    pickler.dump(value)
    return file.getvalue()


def _check_growth(raw: bytes) -> None:
    """Refuse a pickle that grows when it is loaded: a few bytes could otherwise ask for gigabytes.

    Two kinds are refused. Python allocates its memo up to the highest number that an object is given. And to
    hash a tuple of tuples, or to compare frozen sets of frozen sets, Python visits every occurrence of a
    shared one, which can be exponentially many.
    """
    seen, last = 0, ""
    hashed: set[int] = set()
    for name, argument in _instructions(raw):
        if name in _STORES:
            number = seen if name == "MEMOIZE" else argument
            if not (isinstance(number, int) and 0 <= number <= seen + _SKIPPED):
                raise pickle.UnpicklingError(f"it numbers its object {seen} out of range")
            if last.startswith("TUPLE") or last == "FROZENSET":
                hashed.add(number)
            else:
                hashed.discard(number)
            seen += 1
        elif name in ("GET", "BINGET", "LONG_BINGET") and argument in hashed:
            raise pickle.UnpicklingError("it uses one tuple or frozen set several times")
        elif name in _REFUSED:
            raise pickle.UnpicklingError(f"it has the instruction {name}, which no array needs")
        last = name


def _instructions(raw: bytes) -> Iterator[tuple[str, Any]]:
    """The names of a pickle's instructions, and their arguments."""
    try:
        for opcode, argument, _ in pickletools.genops(raw):
            yield opcode.name, argument
    except ValueError as error:
        raise pickle.UnpicklingError(str(error)) from error


_STORES = ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE")
_SKIPPED = 1 << 16  # the most memo numbers that a pickle may skip; pickles of Python 2 skip some
_REFUSED = ("DUP", "INST", "OBJ", "PERSID", "BINPERSID")


def _encode_latin1(text: str, encoding: str) -> bytes:
    """Takes the place of `_codecs.encode`, by which Python 3 writes bytes in old protocols."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes in the encoding {encoding!r}")
    return text.encode("latin1")


class _Array:
    """Takes the place of `numpy.ndarray`: a call of the real class could read any memory as objects."""


def _dtype(code: str | bytes, align: bool = False, copy: bool = True) -> np.dtype[Any]:
    # A new object each time, because the pickle then sets its state.
    dtype: np.dtype[Any] = np.dtype(code.decode() if isinstance(code, bytes) else code, False, True)
    if dtype.kind not in "biufSU":
        raise pickle.UnpicklingError(f"it holds an array of {dtype}, not of numbers or text")
    return dtype


def _empty_array(kind: type[_Array], shape: tuple[int, ...], code: bytes) -> Any:
    """An array without elements; the pickle's next instructions set its shape, type and values."""
    return _RECONSTRUCT(np.ndarray, (0,), b"b")


# The builders are taken from an array's own `__reduce_ex__`: they live in private modules of NumPy.
_RECONSTRUCT: Any = np.zeros(1).__reduce_ex__(2)[0]
_BUILDERS: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _dtype,
    ("_codecs", "encode"): _encode_latin1,
}
for _core in ("numpy.core", "numpy._core"):  # the names that NumPy 1 and 2 write
    _BUILDERS[f"{_core}.multiarray", "_reconstruct"] = _empty_array
    _BUILDERS[f"{_core}.multiarray", "scalar"] = np.int64(0).__reduce__()[0]
    _BUILDERS[f"{_core}.numeric", "_frombuffer"] = np.zeros(1).__reduce_ex__(5)[0]


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:
        try:
            return _BUILDERS[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no array needs") from None
