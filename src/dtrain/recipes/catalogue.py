"""The list of recipes, and the options of each beyond those that all recipes share.

It imports neither TensorFlow nor a recipe, so that the command line can list the recipes and reject wrong
options quickly.
"""

from __future__ import annotations

import importlib
from dataclasses import Field, dataclass
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

from dtrain.base.option_fields import flag, option, own_fields
from dtrain.base.words import check_word
from dtrain.errors import ConfigurationError
from dtrain.recipes.options import RecipeOptions


@dataclass(frozen=True, kw_only=True)
class Cifar10Options(RecipeOptions):
    """The options of the recipe `cifar10`.

    Args:
        model: "resnet", or "small" for a CPU.
        width: the number of filters of the residual network's first convolution; None means 32. Not with
            "small".
        data: the path of the archive or of its directory; None searches the usual places.
        limit: the number of examples of each part to use, for trials; None means all.
        download: whether to download the archive if it is missing.

    Raises:
        ConfigurationError: a value is out of range or unknown, or two options contradict each other.
    """

    usual_batch: ClassVar[int] = 128
    usual_rate: ClassVar[float] = 1e-3
    usual_warmup: ClassVar[float] = 5.0

    epochs: int = option(60, "passes over the training data", metavar="E", least=1, noun="number of epochs")
    model: str = option(
        "resnet", "model to train: resnet, or small for a CPU", metavar="MODEL", words=("resnet", "small")
    )
    width: int | None = option(
        None, "filters of the residual network's first convolution (default: 32)", metavar="W", least=1
    )
    data: str | None = option(None, "the archive, or the folder that contains the archive", metavar="PATH")
    limit: int | None = option(None, "use at most N examples of each part, for a trial", metavar="N", least=1)
    download: bool = option(False, "download the archive if it is missing (170 MB)")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width is not None and self.model != "resnet":
            raise ConfigurationError(
                f"The width is {self.width}, but the model {self.model!r} has one size.",
                hint="Leave --width out, or use --model resnet.",
            )

    def filters(self) -> int:
        """The number of filters of the residual network's first convolution."""
        return 32 if self.width is None else self.width

    def check_data(self) -> None:
        """Read the data once, to check it.

        Raises:
            DataError: the data is not found (the message lists the places searched) or is invalid.
        """
        from dtrain.data import load_cifar10

        load_cifar10(self.data, limit=self.limit, download=self.download)


@dataclass(frozen=True, kw_only=True)
class TextOptions(RecipeOptions):
    """The options that the recipes on texts share.

    Args:
        model: "embedding" (the mean of the words' vectors) or "transformer".
        vocabulary: the number of tokens, with the padding and the unknown word; at least 3.
        sequence_length: the number of words after which a text is cut.
        data: the path of the texts.
        limit: the number of texts of each part to use, for trials; None means all.
        encoding: the character encoding of the texts.

    Raises:
        ConfigurationError: a value is out of range or unknown, or two options contradict each other.
    """

    model: str = option(
        "embedding",
        "model to train: embedding or transformer",
        metavar="MODEL",
        words=("embedding", "transformer"),
    )
    # At least 3: the padding, the unknown word, and one known word.
    vocabulary: int = option(10_000, "number of tokens, including the unknown word", metavar="V", least=3)
    sequence_length: int = option(250, "words after which a text is cut", metavar="L", least=1)
    data: str | None = option(None, "path of the texts", metavar="PATH")
    limit: int | None = option(None, "use at most N texts of each part, for a trial", metavar="N", least=1)
    encoding: str = option("utf-8", "character encoding of the texts", metavar="NAME")

    def rate(self) -> float:
        """The highest learning rate, before scaling.

        The default is 0.003 for "embedding" and 0.0005 for "transformer".
        """
        return self.learning_rate or {"embedding": 3e-3, "transformer": 5e-4}[self.model]


@dataclass(frozen=True, kw_only=True)
class ImdbOptions(TextOptions):
    """The options of the recipe `imdb`: those of `TextOptions`; `data` is the archive or its folder.

    Args:
        download: whether to download the archive if it is missing.
    """

    download: bool = option(False, "download the archive if it is missing (84 MB)")

    def check_data(self) -> None:
        """Read the reviews once, to check them.

        Raises:
            DataError: the reviews are not found (the message lists the places searched) or are invalid.
        """
        from dtrain.data import load_imdb

        load_imdb(self.data, limit=self.limit, encoding=self.encoding, download=self.download)


@dataclass(frozen=True, kw_only=True)
class TextCsvOptions(TextOptions):
    """The options of the recipe `text-csv`: those of `TextOptions`, and the columns of the user's file.

    Args:
        data: the path of the CSV file; required.
        text_columns: the names of the columns whose texts are joined, separated by commas.
        label_column: the name of the label's column; a label is a number or a word.

    Raises:
        ConfigurationError: `data` is missing, or as for `TextOptions`.
    """

    text_columns: str = option("title,text", "columns with the text, separated by commas", metavar="NAMES")
    label_column: str = option("label", "column with the label", metavar="NAME")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.data is None:
            raise ConfigurationError(
                "The recipe 'text-csv' trains on a file of yours, and none is given.",
                hint="Name it with --data FILE.csv; it has a header, such as title,text,label.",
            )

    def columns(self) -> tuple[str, ...]:
        """The names of the text columns, in order."""
        return tuple(name.strip() for name in self.text_columns.split(","))

    def check_data(self) -> None:
        """Read the file once, to check it.

        Raises:
            DataError: the file is missing or invalid.
        """
        from dtrain.data import load_text_csv

        load_text_csv(str(self.data), text=self.columns(), label=self.label_column, encoding=self.encoding)


@dataclass(frozen=True, kw_only=True)
class SyntheticOptions(RecipeOptions):
    """The options of the recipe `synthetic`.

    Args:
        model: "cnn" on images, or "transformer" on sequences of tokens.
        size: the number of training examples; validation and test have a quarter as many each.
        classes: the number of classes; None means 10 for "cnn" and 2 for "transformer".
        image_size: the height and width of an image in pixels, at least 16; None means 32. Only for "cnn".
        sequence_length: the number of tokens of a text; None means 128. Only for "transformer".
        vocabulary: the number of tokens, at least the number of classes + 2; None means 10000. Only for
            "transformer".
        width: the number of filters of the widest convolution, or the size of a token's vector; a multiple of
            8.

    Raises:
        ConfigurationError: a value is out of range or unknown, or two options contradict each other.
    """

    usual_rate: ClassVar[float] = 1e-3
    # The options that only one of the models has, and their defaults.
    own: ClassVar[dict[str, dict[str, int]]] = {
        "cnn": {"image_size": 32},
        "transformer": {"sequence_length": 128, "vocabulary": 10_000},
    }

    epochs: int = option(3, "passes over the training data", metavar="E", least=1, noun="number of epochs")
    model: str = option(
        "cnn", "model to train: cnn or transformer", metavar="MODEL", words=("cnn", "transformer")
    )
    size: int = option(2000, "examples to train on", metavar="N", least=8)
    classes: int | None = option(
        None, "number of classes (default: 10 with the cnn, 2 with the transformer)", metavar="C", least=2
    )
    image_size: int | None = option(
        None, "height and width of an image, for the cnn (default: 32)", metavar="P", least=16
    )
    sequence_length: int | None = option(
        None, "words in a text, for the transformer (default: 128)", metavar="L", least=1
    )
    vocabulary: int | None = option(
        None, "number of tokens, for the transformer (default: 10000)", metavar="V", least=4
    )
    width: int = option(
        256, "filters of the widest convolution, or size of a token's vector", metavar="W", least=8
    )

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
                f"The number of classes is {self.class_count()}, but the vocabulary has only "
                f"{self.number('vocabulary')} words.",
                hint=f"Set --vocabulary to {self.class_count() + 2} or more, or --classes to fewer: each "
                "class has a word of its own.",
            )
        if self.width % 8:
            raise ConfigurationError(
                f"The width is {self.width}.",
                hint="Set it to a multiple of 8: it is divided over 8 heads, or halved twice.",
            )

    def class_count(self) -> int:
        """The number of classes."""
        return self.classes or {"cnn": 10, "transformer": 2}[self.model]

    def number(self, name: str) -> int:
        """The value of `image_size`, `sequence_length` or `vocabulary`, or its default."""
        given = getattr(self, name)
        return int(self.own[self.model][name] if given is None else given)


class Recipe(NamedTuple):
    """What the list says about a recipe without importing it.

    Attributes:
        line: what the recipe trains, in one line.
        options: the class of the recipe's options.
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
"""All recipes by name. A recipe's module is `dtrain.recipes.<name>`, with underscores for hyphens."""


def check_recipe(name: str) -> str:
    """Check that a recipe of this name exists; the name may have hyphens or underscores.

    Returns:
        The name as in `RECIPES`, with hyphens.

    Raises:
        ConfigurationError: there is no such recipe; the message lists all recipes, and the nearest name.
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
        ConfigurationError: there is no such recipe.
    """
    return importlib.import_module(f"dtrain.recipes.{check_recipe(name).replace('-', '_')}")


def options_of_single_recipes() -> dict[str, dict[str, Field[Any]]]:
    """The options that not all recipes have: for each name, the field in each recipe that has it."""
    options: dict[str, dict[str, Field[Any]]] = {}
    for name, recipe in RECIPES.items():
        for field in own_fields(recipe.options, beyond=RecipeOptions):
            options.setdefault(field.name, {})[name] = field
    return options
