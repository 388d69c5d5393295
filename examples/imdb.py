"""Tell good reviews from bad ones by their words, from the IMDb archive as it is published.

Run `python examples/imdb.py [STRATEGY [DATA]]`, or `dtrain launch --workers 2 examples/imdb.py`. DATA is the
archive or the folder that it is in; `dtrain train imdb` has a transformer too.
"""

from __future__ import annotations

import sys
from typing import Any

import keras
import tensorflow as tf

import dtrain
from dtrain.data import Texts, load_imdb

VOCABULARY = 10_000
LENGTH = 250
BATCH_PER_REPLICA = 64


def make_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((LENGTH,), dtype="int64"),
            keras.layers.Embedding(VOCABULARY, 16, mask_zero=True),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.Dense(1),
        ]
    )


def main(strategy_name: str = "auto", data: str | None = None, epochs: int = 5) -> dict[str, Any]:
    strategy = dtrain.strategy(strategy_name)
    global_batch = BATCH_PER_REPLICA * strategy.num_replicas_in_sync
    reviews = load_imdb(data)

    keras.utils.set_random_seed(13)
    # Every worker learns the same words, since all have the same texts.
    to_numbers = keras.layers.TextVectorization(VOCABULARY, output_sequence_length=LENGTH)
    to_numbers.adapt(tf.data.Dataset.from_tensor_slices(reviews.train.texts).batch(256))

    def pipeline(part: Texts) -> tf.data.Dataset:
        examples = tf.data.Dataset.from_tensor_slices((part.texts, part.labels))
        return examples.batch(global_batch).map(lambda text, label: (to_numbers(text), label)).cache()

    with strategy.scope():
        model = make_model()
        model.compile(
            optimizer=keras.optimizers.Adam(0.005),
            loss=keras.losses.BinaryCrossentropy(from_logits=True),
            # The output is no probability: 0.0 lies between the two answers.
            metrics=[keras.metrics.BinaryAccuracy(threshold=0.0, name="accuracy")],
        )
    history = model.fit(pipeline(reviews.train), epochs=epochs, verbose=0)
    result = model.evaluate(pipeline(reviews.test), return_dict=True, verbose=0)
    if dtrain.is_chief():
        print(f"{strategy.num_replicas_in_sync} replicas: test accuracy {result['accuracy']:.3f}")
    return {"losses": history.history["loss"], "test": result}


if __name__ == "__main__":
    main(*sys.argv[1:3])
