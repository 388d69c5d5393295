"""Pickles that hold NumPy arrays, lists and text, and can do nothing else when they are read.

A pickle may call any function of the machine that reads it; here it may name only what builds an array.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Iterator
from typing import Any

import numpy as np


def load_arrays(raw: bytes) -> Any:
    """What a pickle holds; text of Python 2 comes as bytes.

    Args:
        raw: the pickle, of any protocol and of Python 2 or 3.

    Raises:
        pickle.UnpicklingError: the pickle names something that no array needs, or would take far more memory
            or time than it has bytes.
        Exception: others where the bytes are no whole pickle, as `pickle.loads` does.
    """
    _check_growth(raw)
    return _ArrayUnpickler(io.BytesIO(raw), encoding="bytes").load()


def _check_growth(raw: bytes) -> None:
    """Refuse a pickle that grows when it is read: by a few bytes of it, gigabytes could be asked for.

    Python makes room up to the highest number that an object is given, and visits all of a tuple of tuples
    to use it as a key, however often the same one is in it.
    """
    seen, last = 0, ""
    tuples: set[int] = set()
    for name, argument in _instructions(raw):
        if name in _STORES:
            number = seen if name == "MEMOIZE" else argument
            if not (isinstance(number, int) and 0 <= number <= seen + _SKIPPED):
                raise pickle.UnpicklingError(f"it gives its object {seen} another number, beyond all bounds")
            if last.startswith("TUPLE"):
                tuples.add(number)
            else:
                tuples.discard(number)
            seen += 1
        elif name in ("GET", "BINGET", "LONG_BINGET") and argument in tuples:
            raise pickle.UnpicklingError("it uses one tuple several times")
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
_SKIPPED = 1 << 16  # numbers that Python 2 left out
_REFUSED = ("DUP", "FROZENSET", "ADDITEMS", "EMPTY_SET", "INST", "OBJ", "PERSID", "BINPERSID")


def _encode_latin1(text: str, encoding: str) -> bytes:
    """What Python 3 writes for bytes in old protocols."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes in the encoding {encoding!r}")
    return text.encode("latin1")


class _Array:
    """Stands for the class of an array, which could be called to look at any memory as objects."""


def _dtype(code: str | bytes, align: bool = False, copy: bool = True) -> np.dtype[Any]:
    # A new one each time: the pickle then writes into it.
    dtype: np.dtype[Any] = np.dtype(code.decode() if isinstance(code, bytes) else code, False, True)
    if dtype.kind not in "biufSU":
        raise pickle.UnpicklingError(f"it holds an array of {dtype}, not of numbers or text")
    return dtype


def _empty_array(kind: type[_Array], shape: tuple[int, ...], code: bytes) -> Any:
    """An array without elements; what the pickle says next gives it its shape, type and values."""
    return _RECONSTRUCT(np.ndarray, (0,), b"b")


# An array itself says what builds it: the functions stand in modules that are NumPy's own affair.
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
