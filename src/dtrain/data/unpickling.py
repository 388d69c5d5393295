"""Pickles that hold NumPy arrays, lists and text, and can do nothing else when they are read.

A pickle may call any function of the machine that reads it; here it may name only what builds an array.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np


def load_arrays(raw: bytes) -> Any:
    """What a pickle holds; text of Python 2 comes as bytes.

    Args:
        raw: the pickle, of any protocol and of Python 2 or 3.

    Raises:
        pickle.UnpicklingError: the pickle names something that no array needs.
        Exception: others where the bytes are no whole pickle, as `pickle.loads` does.
    """
    return _ArrayUnpickler(io.BytesIO(raw), encoding="bytes").load()


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
