"""What is trained on? The sources of the built-in recipes, each as NumPy arrays, one file a source.

It makes no pipeline and knows no strategy: batching, shuffling and sharding are done by who trains.
"""

from __future__ import annotations

from dtrain.data.digits import Digits, Examples, load_digits

__all__ = ["Digits", "Examples", "load_digits"]
