"""What is trained on? The sources, each as NumPy arrays or texts, one file a source.

It knows no strategy: batching, shuffling and sharding are done by who trains.
"""

from __future__ import annotations

from dtrain.data.cifar10 import Cifar10, load_cifar10
from dtrain.data.digits import Digits, Examples, load_digits
from dtrain.data.imdb import Imdb, load_imdb
from dtrain.data.synthetic import Tokens, Values, synthetic_images, synthetic_texts, synthetic_values
from dtrain.data.text_csv import TextCsv, load_text_csv
from dtrain.data.texts import Texts

__all__ = [
    "Cifar10",
    "Digits",
    "Examples",
    "Imdb",
    "TextCsv",
    "Texts",
    "Tokens",
    "Values",
    "load_cifar10",
    "load_digits",
    "load_imdb",
    "load_text_csv",
    "synthetic_images",
    "synthetic_texts",
    "synthetic_values",
]
