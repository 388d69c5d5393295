"""All uses of private names of Keras and TensorFlow, and the check of their versions.

Nothing outside this folder imports `keras.src` or `tensorflow.python`. A `Reach` is the use of one private
name: it states why the name is needed and which public issue is about it, and `record.json` holds its
signature in every version that was tested. If a signature changes upstream, a test fails, and no strategy
can be created. What differs between supported versions is stated here, and nowhere else.
`python -m dtrain.upstream` lists all reaches.
"""

from __future__ import annotations

from dtrain.upstream.reach import Reach


def all_reaches() -> list[Reach]:
    """Every private name that dtrain uses or replaces."""
    from dtrain.upstream import keras_names, tensorflow_names

    return [
        reach
        for module in (keras_names, tensorflow_names)
        for reach in vars(module).values()
        if isinstance(reach, Reach)
    ]
