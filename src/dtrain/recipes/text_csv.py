"""Classifies the texts of any CSV file with columns for text and label, such as title, text and label.

Run it alone (`python -m dtrain.recipes.text_csv --data FILE.csv`), as `dtrain train text-csv`, or in many
processes (`dtrain launch --workers 2 -m dtrain.recipes.text_csv`). A tenth of the texts is held out for
validation and a fifth for the test, the same ones in every run. `model.keras` takes a text, whose columns are
joined by a space; `classes.txt` names the class of each output.
"""

from __future__ import annotations

from dtrain.base import safe_files
from dtrain.data import Texts, load_text_csv
from dtrain.monitor import RunDirectory
from dtrain.recipes.catalogue import TextCsvOptions
from dtrain.recipes.running import TrainingRun, show
from dtrain.recipes.texts import train_on

_FILE = "classes.txt"


def train(options: TextCsvOptions) -> str:
    """Train and test the model, and write the files of the run. Every process of the job must call this.

    Returns:
        A summary of the run, the same in every process. All files are complete when this returns.

    Raises:
        DataError: the file is missing or cannot be read.
        ConfigurationError: before training, if the batches do not fit the number of replicas or the run
            directory cannot be used for the run.
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

    def name_classes(directory: RunDirectory) -> None:
        safe_files.write_text(directory.path / _FILE, "\n".join(texts.classes) + "\n")

    return train_on(run, options, train, validation, test, classes=len(texts.classes), also=name_classes)


if __name__ == "__main__":
    show(train(TextCsvOptions.parse()))
