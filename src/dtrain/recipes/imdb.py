"""IMDb: classifies 50,000 film reviews as good or bad, by the mean of their words or by a small transformer.

Run it alone (`python -m dtrain.recipes.imdb`), as `dtrain train imdb`, or in many processes
(`dtrain launch --workers 2 -m dtrain.recipes.imdb`). `--data` names the published archive or its directory. A
tenth of the training reviews is held out for validation. `model.keras` takes the text of a review.
"""

from __future__ import annotations

from dtrain.data import Texts, load_imdb
from dtrain.recipes.catalogue import ImdbOptions
from dtrain.recipes.running import TrainingRun, show
from dtrain.recipes.splits import hold_out
from dtrain.recipes.texts import train_on

_CLASSES = 2


def train(options: ImdbOptions) -> str:
    """Train and test the model, and write the files of the run. Every process of the job must call this.

    Returns:
        A summary of the run, the same in every process. All files are complete when this returns.

    Raises:
        DataError: the reviews are missing or cannot be read.
        ConfigurationError: before training, if the batches do not fit the number of replicas or the run
            directory cannot be used for the run.
    """
    run = TrainingRun("imdb", options)
    reviews = load_imdb(
        options.data, limit=options.limit, encoding=options.encoding, download=options.download
    )
    train, validation = (
        Texts([reviews.train.texts[place] for place in part], reviews.train.labels[part])
        for part in hold_out(reviews.train.labels)
    )
    return train_on(run, options, train, validation, reviews.test, classes=_CLASSES)


if __name__ == "__main__":
    show(train(ImdbOptions.parse()))
