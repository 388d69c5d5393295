"""What mixed precision saves of memory, by part, on a CNN and a transformer.

    python benchmarks/memory.py [--sizes small,large] [--batches 8,32] [--policies float32,mixed_float16,...]
        [--out FILE.json]

For each model, size and batch a step is predicted and measured under each dtype policy, in one process.
"""

from __future__ import annotations

import argparse
from typing import Any

import jobs

PARTS = ("parameters", "gradients", "optimizer", "activations", "workspace", "total")
SIZES = {"cnn": {"small": 32, "large": 64}, "transformer": {"small": 64, "large": 128}}


def cnn(side: int) -> Any:
    """Six convolutions of 64 to 256 channels, two of them normalised, on square images of `side` pixels."""
    import keras
    from keras import layers

    blocks: list[Any] = []
    for width in (64, 128, 256):
        blocks += [
            layers.Conv2D(width, 3, activation="relu"),
            layers.BatchNormalization(),
            layers.Conv2D(width, 3, activation="relu"),
            layers.GlobalAveragePooling2D() if width == 256 else layers.MaxPooling2D(2),
        ]
    head = [layers.Dense(512, activation="relu"), layers.Dropout(0.5), layers.Dense(10, activation="softmax")]
    model = keras.Sequential([keras.Input((side, side, 3)), *blocks, *head])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def transformer(words: int) -> Any:
    """Four blocks of width 256 with eight heads, on texts of `words` words out of 10,000."""
    import keras
    import tensorflow as tf
    from keras import layers

    text = keras.Input((words,), dtype="int32")
    x = layers.Embedding(10_000, 256)(text) + layers.Embedding(words, 256)(tf.range(words))
    for _ in range(4):
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(num_heads=8, key_dim=32)(x, x))
        x = layers.LayerNormalization()(x + layers.Dense(256)(layers.Dense(512, activation="relu")(x)))
    model = keras.Model(text, layers.Dense(1, activation="sigmoid")(layers.GlobalAveragePooling1D()(x)))
    model.compile("adam", "binary_crossentropy", metrics=["accuracy"])
    return model


def examined(model: str, side: int, batch: int, policy: str) -> dict[str, Any]:
    """A step under a policy: what is predicted and what is measured."""
    import keras

    from dtrain.optim import measure_memory, predict_memory

    keras.utils.set_random_seed(1)
    keras.config.set_dtype_policy(policy)
    made = {"cnn": cnn, "transformer": transformer}[model](side)
    memories = {"predicted": predict_memory(made, batch), "measured": measure_memory(made, batch)}
    keras.utils.clear_session()
    return {
        "model": model,
        "size": side,
        "batch": batch,
        "policy": policy,
        **{way: {part: getattr(memory, part) for part in PARTS} for way, memory in memories.items()},
    }


def main() -> None:
    """Examines all, prints a table and writes JSON."""
    parser = argparse.ArgumentParser(description="memory by part under mixed precision")
    parser.add_argument("--models", default="cnn,transformer", help="separated by commas")
    parser.add_argument("--sizes", default="small,large", help="separated by commas")
    parser.add_argument("--batches", default="8,32", help="separated by commas")
    parser.add_argument("--policies", default="float32,mixed_float16,mixed_bfloat16")
    parser.add_argument("--out", help="where the JSON goes instead of the screen")
    arguments = parser.parse_args()
    rows = [
        examined(model, SIZES[model][size], int(batch), policy)
        for model in arguments.models.split(",")
        for size in arguments.sizes.split(",")
        for batch in arguments.batches.split(",")
        for policy in arguments.policies.split(",")
    ]
    print_table(rows)
    jobs.write({**jobs.circumstances(), "unit": "bytes", "steps": rows}, arguments.out)


def print_table(rows: list[dict[str, Any]]) -> None:
    """One line a step, in megabytes, and how much of the first policy's measured total is saved."""
    heads = ["model", "size", "batch", "policy", *PARTS, "saved", "predicted activations"]
    cells = []
    first: dict[tuple[Any, ...], int] = {}
    for row in rows:
        measured, total = row["measured"], row["measured"]["total"]
        base = first.setdefault((row["model"], row["size"], row["batch"]), total)
        cells.append([row["model"], str(row["size"]), str(row["batch"]), row["policy"]])
        cells[-1] += [f"{measured[part] / 1e6:.1f}" for part in PARTS]
        cells[-1] += [f"{1 - total / base:.0%}", f"{row['predicted']['activations'] / 1e6:.1f}"]
    jobs.print_table(heads, cells)


if __name__ == "__main__":
    main()
