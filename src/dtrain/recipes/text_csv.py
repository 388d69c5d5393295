"""Texts of your own: any CSV file with columns for the text and for a label, such as title, text and label.

Run it alone (`python -m dtrain.recipes.text_csv --data FILE.csv`), as `dtrain train text-csv`, or in many
processes (`dtrain launch --workers 2 -m dtrain.recipes.text_csv`). A tenth of the texts is kept for
validation and a fifth for the test, the same ones in every run. `model.keras` takes texts as they are, with
their columns joined by a space; `classes.txt` names what its outputs stand for.
"""

from __future__ import annotations

import keras

import dtrain
from dtrain.data import Texts, load_text_csv
from dtrain.monitor import RunDirectory
from dtrain.recipes.catalogue import TextCsvOptions
from dtrain.recipes.running import TrainingRun
from dtrain.recipes.texts import build_model, learn_words, make_data, saving_with

_FILE = "classes.txt"


def train(options: TextCsvOptions) -> str:
    """Train, test, and leave the files of the run. Every process of the job calls this.

    Returns:
        A summary of the run; the same on every process, by when all files are whole.

    Raises:
        DataError: the file is not there, or cannot be read.
        ConfigurationError: before training, if the batches do not fit the number of replicas or the run
            directory cannot take the run.
    """
    run = TrainingRun("text-csv", options)
    texts = load_text_csv(
        str(options.data),
        text=options.columns(),
        label=options.label_column,
        encoding=options.encoding,
    )
    train, validation, test = (
        Texts(part.texts[: options.limit], part.labels[: options.limit])
        for part in (texts.train, texts.validation, texts.test)
    )
    words = learn_words(train.texts, options.vocabulary, options.sequence_length)
    data = make_data(train, validation, test, words, run.batches.micro_batch, options.seed)
    rate = run.schedule(len(data.train))
    save_model = saving_with(words)

    def save(model: keras.Model, directory: RunDirectory) -> None:
        save_model(model, directory)
        if dtrain.is_chief():
            (directory.path / _FILE).write_text("\n".join(texts.classes) + "\n", encoding="utf-8")

    classes = len(texts.classes)
    return run.train(
        data,
        lambda: build_model(options, words.vocabulary_size(), classes, rate, run.accumulation),
        save=save,
    )


if __name__ == "__main__":
    summary = train(TextCsvOptions.parse())
    if dtrain.is_chief():
        print(summary)
