"""The list of recipes, and the options that each takes beyond those common to all.

It imports neither TensorFlow nor a recipe, so that the command line can tell what there is and refuse what
is not.
"""

from __future__ import annotations

import importlib
from dataclasses import Field, dataclass
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

from dtrain.errors import ConfigurationError, known_are
from dtrain.recipes.arguments import flag, option, own_fields
from dtrain.recipes.batches import at_least_one
from dtrain.recipes.options import RecipeOptions, one_of


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
    models: ClassVar[tuple[str, ...]] = ("resnet", "small")

    epochs: int = option(60, "passes over the training data", metavar="E", type=int)
    model: str = option("resnet", "resnet, or small for a CPU", metavar="MODEL")
    width: int | None = option(
        None, "filters of the residual network's first convolution; by default 32", metavar="W", type=int
    )
    data: str | None = option(None, "the archive or its directory", metavar="PATH")
    limit: int | None = option(None, "examples of each part, for trials", metavar="N", type=int)

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("model", self.model, self.models)
        at_least_one("limit", self.limit, "It is a number of examples.")
        at_least_one("width", self.width, "It is a number of filters.")
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

    models: ClassVar[tuple[str, ...]] = ("embedding", "transformer")

    model: str = option("embedding", "embedding or transformer", metavar="MODEL")
    vocabulary: int = option(10_000, "words that are known", metavar="V", type=int)
    sequence_length: int = option(250, "words after which a text is cut", metavar="L", type=int)
    data: str | None = option(None, "where the texts are", metavar="PATH")
    limit: int | None = option(None, "texts of each part, for trials", metavar="N", type=int)
    encoding: str = option("utf-8", "how the texts are written", metavar="NAME")

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("model", self.model, self.models)
        at_least_one("sequence length", self.sequence_length, "It is a number of words.")
        at_least_one("limit", self.limit, "It is a number of texts.")
        if self.vocabulary < 3:
            raise ConfigurationError(
                f"The vocabulary is {self.vocabulary}.",
                hint="It holds the padding, the unknown word and at least one known: set it to 3 or more.",
            )

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

    models: ClassVar[tuple[str, ...]] = ("cnn", "transformer")
    usual_rate: ClassVar[float] = 1e-3
    # What each model takes that the other has no use for, and its usual value and smallest one.
    own: ClassVar[dict[str, dict[str, tuple[int, int]]]] = {
        "cnn": {"image_size": (32, 16)},
        "transformer": {"sequence_length": (128, 1), "vocabulary": (10_000, 4)},
    }

    epochs: int = option(3, "passes over the training data", metavar="E", type=int)
    model: str = option("cnn", "cnn or transformer", metavar="MODEL")
    size: int = option(2000, "examples to train on", metavar="N", type=int)
    classes: int | None = option(
        None, "how many to tell apart; by default 10 by the cnn, 2 by the transformer", metavar="C", type=int
    )
    image_size: int | None = option(
        None, "height and width of an image, for the cnn; by default 32", metavar="P", type=int
    )
    sequence_length: int | None = option(
        None, "words in a text, for the transformer; by default 128", metavar="L", type=int
    )
    vocabulary: int | None = option(
        None, "words that there are, for the transformer; by default 10000", metavar="V", type=int
    )
    width: int = option(256, "of the widest convolution, or of a word's vector", metavar="W", type=int)

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("model", self.model, self.models)
        self._check_least("size", 8)
        self._check_least("classes", 2)
        for model, names in self.own.items():
            for name, (_, least) in names.items():
                self._check_least(name, least)
                if model != self.model and getattr(self, name) is not None:
                    raise ConfigurationError(
                        f"The {_words(name)} is {getattr(self, name)}, but a {self.model} has none.",
                        hint=f"Leave {flag(name)} out, or use --model {model}.",
                    )
        if self.model == "transformer" and self.number("vocabulary") < self.class_count() + 2:
            raise ConfigurationError(
                f"The vocabulary is {self.vocabulary}, too small for {self.class_count()} classes.",
                hint="Each class has a word of its own, and one is for all.",
            )
        if self.width < 8 or self.width % 8:
            raise ConfigurationError(
                f"The width is {self.width}.",
                hint="Set it to a multiple of 8: it is divided over 8 heads, or halved twice.",
            )

    def _check_least(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if value is not None and value < least:
            raise ConfigurationError(f"The {_words(name)} is {value}.", hint=f"Set it to {least} or more.")

    def class_count(self) -> int:
        """How many classes there are to tell apart."""
        return self.classes or {"cnn": 10, "transformer": 2}[self.model]

    def number(self, name: str) -> int:
        """What was said of `image_size`, `sequence_length` or `vocabulary`, or the usual value."""
        given = getattr(self, name)
        return int(self.own[self.model][name][0] if given is None else given)


def _words(name: str) -> str:
    return name.replace("_", " ")


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
    if canonical in RECIPES:
        return canonical
    raise ConfigurationError(f"The recipe {name!r} is not known.", hint=known_are(RECIPES, canonical))


def load_recipe(name: str) -> ModuleType:
    """Import the recipe's module, and with it TensorFlow.

    Returns:
        A module with `train(options) -> str`, which trains with options of the recipe's own class and returns
        a summary to print.

    Raises:
        ConfigurationError: no recipe has this name.
    """
    return importlib.import_module(f"dtrain.recipes.{check_recipe(name).replace('-', '_')}")


def recipes_with(option: str) -> list[str]:
    """The recipes that have the option of this field's name."""
    return [name for name, recipe in RECIPES.items() if option in recipe.options.__dataclass_fields__]


def all_options() -> list[Field[Any]]:
    """The fields of all recipes that are not common to all; of each name the first."""
    found: dict[str, Field[Any]] = {}
    for recipe in RECIPES.values():
        for each in own_fields(recipe.options, beyond=RecipeOptions):
            found.setdefault(each.name, each)
    return list(found.values())
