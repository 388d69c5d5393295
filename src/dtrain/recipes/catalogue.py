"""The list of recipes, and the options that each takes beyond those common to all.

It imports neither TensorFlow nor a recipe, so that the command line can tell what there is and refuse what
is not.
"""

from __future__ import annotations

import importlib
from dataclasses import Field, dataclass
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

from dtrain.errors import ConfigurationError
from dtrain.option_fields import flag, option, own_fields
from dtrain.recipes.options import RecipeOptions
from dtrain.words import check_word


@dataclass(frozen=True, kw_only=True)
class Cifar10Options(RecipeOptions):
    """What the recipe `cifar10` takes.

    Args:
        model: "resnet", or "small" for a CPU.
        width: filters of the first convolution, for the residual network only.
        data: where the archive or its directory is; None to look in the usual places.
        limit: how many examples of each part to use, for trials; None for all.
    """

    usual_batch: ClassVar[int] = 128
    usual_rate: ClassVar[float] = 1e-3
    usual_warmup: ClassVar[float] = 5.0

    epochs: int = option(60, "passes over the training data", metavar="E", least=1, noun="number of epochs")
    model: str = option("resnet", "resnet, or small for a CPU", metavar="MODEL", words=("resnet", "small"))
    width: int | None = option(
        None,
        "filters of the residual network's first convolution; by default 32",
        metavar="W",
        type=int,
        least=1,
    )
    data: str | None = option(None, "the archive or its directory", metavar="PATH")
    limit: int | None = option(None, "examples of each part, for trials", metavar="N", type=int, least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width is not None and self.model != "resnet":
            raise ConfigurationError(
                f"The width is {self.width}, but the model {self.model!r} has one size.",
                hint="Leave --width out, or use --model resnet.",
            )

    def filters(self) -> int:
        """Of the residual network's first convolution."""
        return 32 if self.width is None else self.width

    def check_data(self) -> None:
        """Read the data once; DataError says where it was looked for, or what is wrong with it."""
        from dtrain.data import load_cifar10

        load_cifar10(self.data, limit=self.limit)


@dataclass(frozen=True, kw_only=True)
class TextOptions(RecipeOptions):
    """What the recipes on texts take.

    Args:
        model: "embedding" (the mean of the words) or "transformer".
        vocabulary: how many words of the training texts are known; the rest are one.
        sequence_length: words after which a text is cut.
        data: where the texts are.
        limit: how many texts of each part to use, for trials; None for all.
        encoding: how the texts are written.
    """

    model: str = option(
        "embedding", "embedding or transformer", metavar="MODEL", words=("embedding", "transformer")
    )
    # The padding, the unknown word and at least one that is known.
    vocabulary: int = option(10_000, "words that are known", metavar="V", least=3)
    sequence_length: int = option(250, "words after which a text is cut", metavar="L", least=1)
    data: str | None = option(None, "where the texts are", metavar="PATH")
    limit: int | None = option(None, "texts of each part, for trials", metavar="N", type=int, least=1)
    encoding: str = option("utf-8", "how the texts are written", metavar="NAME")

    def rate(self) -> float:
        """0.003 for the embedding, 0.0005 for the transformer."""
        return self.learning_rate or {"embedding": 3e-3, "transformer": 5e-4}[self.model]


@dataclass(frozen=True, kw_only=True)
class ImdbOptions(TextOptions):
    """What the recipe `imdb` takes: that of `TextOptions`; `data` is the archive or its directory."""

    def check_data(self) -> None:
        """Read the reviews once; DataError says where they were looked for, or what is wrong with them."""
        from dtrain.data import load_imdb

        load_imdb(self.data, limit=self.limit, encoding=self.encoding)


@dataclass(frozen=True, kw_only=True)
class TextCsvOptions(TextOptions):
    """What the recipe `text-csv` takes: that of `TextOptions`, with a file of the user's.

    Args:
        data: the CSV file.
        text_columns: the columns whose texts are joined, divided by commas.
        label_column: the column of the label, a number or a word.
    """

    text_columns: str = option("title,text", "columns with the text, divided by commas", metavar="NAMES")
    label_column: str = option("label", "column with the label", metavar="NAME")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.data is None:
            raise ConfigurationError(
                "The recipe 'text-csv' trains on a file of yours, and none is given.",
                hint="Name it with --data FILE.csv; it has a header, such as title,text,label.",
            )

    def columns(self) -> tuple[str, ...]:
        """The names of the text columns."""
        return tuple(name.strip() for name in self.text_columns.split(","))

    def check_data(self) -> None:
        """Read the file once; DataError says what is wrong with it."""
        from dtrain.data import load_text_csv

        load_text_csv(str(self.data), text=self.columns(), label=self.label_column, encoding=self.encoding)


@dataclass(frozen=True, kw_only=True)
class SyntheticOptions(RecipeOptions):
    """What the recipe `synthetic` takes.

    Args:
        model: "cnn" on images, or "transformer" on numbers that stand for words.
        size: how many examples to train on; a quarter as many are for validation, and for the test.
        classes: how many there are to tell apart.
        image_size: height and width of an image, for the cnn only.
        sequence_length: words in a text, for the transformer only.
        vocabulary: words that there are, for the transformer only.
        width: of the widest convolution, or of a word's vector; a multiple of 8.
    """

    usual_rate: ClassVar[float] = 1e-3
    # What each model takes that the other has no use for, and its usual value.
    own: ClassVar[dict[str, dict[str, int]]] = {
        "cnn": {"image_size": 32},
        "transformer": {"sequence_length": 128, "vocabulary": 10_000},
    }

    epochs: int = option(3, "passes over the training data", metavar="E", least=1, noun="number of epochs")
    model: str = option("cnn", "cnn or transformer", metavar="MODEL", words=("cnn", "transformer"))
    size: int = option(2000, "examples to train on", metavar="N", least=8)
    classes: int | None = option(
        None,
        "how many to tell apart; by default 10 by the cnn, 2 by the transformer",
        metavar="C",
        type=int,
        least=2,
    )
    image_size: int | None = option(
        None, "height and width of an image, for the cnn; by default 32", metavar="P", type=int, least=16
    )
    sequence_length: int | None = option(
        None, "words in a text, for the transformer; by default 128", metavar="L", type=int, least=1
    )
    vocabulary: int | None = option(
        None, "words that there are, for the transformer; by default 10000", metavar="V", type=int, least=4
    )
    width: int = option(256, "of the widest convolution, or of a word's vector", metavar="W", least=8)

    def __post_init__(self) -> None:
        super().__post_init__()
        for model, names in self.own.items():
            for name in names:
                if model != self.model and getattr(self, name) is not None:
                    noun = name.replace("_", " ")
                    raise ConfigurationError(
                        f"The {noun} is {getattr(self, name)}, but a {self.model} has none.",
                        hint=f"Leave {flag(name)} out, or use --model {model}.",
                    )
        if self.model == "transformer" and self.number("vocabulary") < self.class_count() + 2:
            raise ConfigurationError(
                f"The vocabulary is {self.vocabulary}, too small for {self.class_count()} classes.",
                hint="Each class has a word of its own, and one is for all.",
            )
        if self.width % 8:
            raise ConfigurationError(
                f"The width is {self.width}.",
                hint="Set it to a multiple of 8: it is divided over 8 heads, or halved twice.",
            )

    def class_count(self) -> int:
        """How many classes there are to tell apart."""
        return self.classes or {"cnn": 10, "transformer": 2}[self.model]

    def number(self, name: str) -> int:
        """What was said of `image_size`, `sequence_length` or `vocabulary`, or the usual value."""
        given = getattr(self, name)
        return int(self.own[self.model][name] if given is None else given)


class Recipe(NamedTuple):
    """What is known of a recipe before it is imported.

    Attributes:
        line: what it trains, in one line.
        options: what it can be told.
    """

    line: str
    options: type[RecipeOptions]


RECIPES = {
    "digits": Recipe("a small CNN on 1797 handwritten digits, which come with dtrain", RecipeOptions),
    "cifar10": Recipe("a residual network, or a small CNN, on the 60,000 images of CIFAR-10", Cifar10Options),
    "imdb": Recipe("film reviews, good or bad, by their words or by a transformer", ImdbOptions),
    "text-csv": Recipe("texts of your own with labels, in a CSV file", TextCsvOptions),
    "synthetic": Recipe("a CNN or a transformer of any size on made-up data", SyntheticOptions),
}
"""Every recipe by its name; `dtrain.recipes.<name>`, with underscores, is its module."""


def check_recipe(name: str) -> str:
    """See that a recipe of this name exists, written with hyphens or underscores.

    Returns:
        The name as it stands in `RECIPES`.

    Raises:
        ConfigurationError: it does not; the message lists those that do, and the nearest.
    """
    canonical = name.replace("_", "-")
    check_word("recipe", canonical, RECIPES)
    return canonical


def load_recipe(name: str) -> ModuleType:
    """Import the recipe's module, and with it TensorFlow.

    Returns:
        A module with `train(options) -> str`, which trains with options of the recipe's own class and returns
        a summary to print.

    Raises:
        ConfigurationError: no recipe has this name.
    """
    return importlib.import_module(f"dtrain.recipes.{check_recipe(name).replace('-', '_')}")


def options_of_single_recipes() -> dict[str, dict[str, Field[Any]]]:
    """Each option that not all recipes have: its name, and the field of each recipe that has it."""
    found: dict[str, dict[str, Field[Any]]] = {}
    for name, recipe in RECIPES.items():
        for each in own_fields(recipe.options, beyond=RecipeOptions):
            found.setdefault(each.name, {})[name] = each
    return found
