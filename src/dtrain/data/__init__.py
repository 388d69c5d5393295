"""Training data: data sets as NumPy arrays or texts (one file a data set), record files, the input pipeline.

It knows no strategy: the engine decides how replicas train on a batch. The data sets need no TensorFlow; the
pipeline and the record files import it when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dtrain.data.cifar10 import Cifar10, load_cifar10
from dtrain.data.digits import Digits, Examples, load_digits
from dtrain.data.imdb import Imdb, load_imdb
from dtrain.data.synthetic import Tokens, Values, synthetic_images, synthetic_texts, synthetic_values
from dtrain.data.text_csv import TextCsv, load_text_csv
from dtrain.data.texts import Texts

if TYPE_CHECKING:
    from dtrain.data.pipeline import Pipeline
    from dtrain.data.record_writers import record_features, write_array_records, write_tfrecords
    from dtrain.data.records import Records, array_records, tfrecords
    from dtrain.data.service import distribute

_WITH_TENSORFLOW = {
    "Pipeline": "dtrain.data.pipeline",
    "Records": "dtrain.data.records",
    "array_records": "dtrain.data.records",
    "distribute": "dtrain.data.service",
    "record_features": "dtrain.data.record_writers",
    "tfrecords": "dtrain.data.records",
    "write_array_records": "dtrain.data.record_writers",
    "write_tfrecords": "dtrain.data.record_writers",
}

__all__ = [
    "Cifar10",
    "Digits",
    "Examples",
    "Imdb",
    "Pipeline",
    "Records",
    "TextCsv",
    "Texts",
    "Tokens",
    "Values",
    "array_records",
    "distribute",
    "load_cifar10",
    "load_digits",
    "load_imdb",
    "load_text_csv",
    "record_features",
    "synthetic_images",
    "synthetic_texts",
    "synthetic_values",
    "tfrecords",
    "write_array_records",
    "write_tfrecords",
]


def __getattr__(name: str) -> Any:
    if name not in _WITH_TENSORFLOW:
        raise AttributeError(f"module 'dtrain.data' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_WITH_TENSORFLOW[name]), name)
