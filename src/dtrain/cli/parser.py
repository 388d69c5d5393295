"""The argument parser of the commands: `argparse` with short error messages that suggest the right option.

An error is one line instead of the whole usage. This module declares no option.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from dtrain.cli.config_file import with_config

# Other programs' names for an option. If a name fits several options of a command, the first is suggested.
_ELSEWHERE = {
    "--accumulation": "gradient-accumulation gradient-accumulation-steps",
    "--data": "dataset",
    "--devices": "gpus num-gpus",
    "--epochs": "num-epochs steps",
    "--global-batch": "batch batch-size bs",
    "--hang-timeout": "timeout",
    "--learning-rate": "lr rate",
    "--max-restarts": "restarts",
    "--per-replica-batch": "micro-batch",
    "--precision": "amp dtype mixed-precision",
    "--ps": "num-ps num-servers parameter-servers servers",
    "--run-dir": "dir log-dir logdir o out out-dir output-dir",
    "--output": "dir log-dir logdir o out out-dir output-dir",
    "--seed": "random-seed",
    "--time-limit": "timeout",
    "--title": "name",
    "--workers": "gpus np nproc nproc-per-node num-gpus num-processes num-workers processes world-size",
    "-m": "module",
}
# Patterns of argparse's messages, and their replacements.
_IN_WORDS = (
    (r"invalid int value: ('.*')$", r"\1 is not an integer"),
    (r"invalid float value: ('.*')$", r"\1 is not a number"),
    (r"invalid [\w.]+ value: ('.*')$", r"\1 cannot be used"),  # of a type that raises no message of its own
    (r"expected one argument$", "a value is missing"),
)
_NUMBER = re.compile(r"-\d+(\.\d*)?|-\.\d+")


class Parser(argparse.ArgumentParser):
    """Accepts only complete option names, and suggests the nearest one for an unknown name."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.allow_abbrev = False

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse the arguments.

        Raises:
            SystemExit: with status 2 if an argument is invalid; its message is on standard error.
            ConfigurationError: the file of `--config` cannot be used.
        """
        if args is not None:
            args = self._joined(args)
            # Checked before argparse, which would take an unknown option's value for a positional argument.
            self._check_options(args)
            args = with_config(self, args)
        return super().parse_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Print one line to standard error and exit with status 2."""
        for pattern, words in _IN_WORDS:
            message = re.sub(pattern, words, message)
        stop = "" if message.endswith(("?", ".")) else "."
        self.exit(2, f"{self.prog}: error: {message}{stop} See {self.prog} --help.\n")

    def _joined(self, arguments: Sequence[str]) -> list[str]:
        """The arguments, in which each option whose value may be left out (`nargs="?"`) has one after a `=`.

        It takes the next word if its type accepts that. argparse would take any, such as the script.
        """
        owns_rest = any(action.nargs == argparse.REMAINDER for action in self._actions)
        words, joined = list(arguments), list[str]()
        while words:
            word = words.pop(0)
            if word == "--" or (owns_rest and not word.startswith("-")):
                return [*joined, word, *words]
            action = self._option_string_actions.get(word)
            if action is not None and action.nargs == "?":
                word = f"{word}={words.pop(0) if words and _accepts(action, words[0]) else action.const}"
            elif action is not None and action.nargs is None and words:
                joined.append(word)
                word = words.pop(0)
            joined.append(word)
        return joined

    def _check_options(self, arguments: Sequence[str]) -> None:
        """Reject unknown options, up to the arguments of the user's own script."""
        owns_rest = any(action.nargs == argparse.REMAINDER for action in self._actions)
        waiting = iter(arguments)
        for word in waiting:
            if word == "--":
                return
            if not word.startswith("-") or word == "-" or _NUMBER.fullmatch(word):
                if owns_rest:
                    return
                continue
            name, equals, _ = word.partition("=")
            action = self._option_string_actions.get(name)
            if action is None:
                if not word.startswith("--") and word[:2] in self._option_string_actions:
                    continue  # a short option with its value attached, such as -n2
                self.error(f"there is no option {name}{self._meant(name)}")
            if action.nargs is None and not equals:
                next(waiting, None)

    def _meant(self, name: str) -> str:
        """The end of the message that suggests the option that was probably meant, or ""."""
        word = name.lstrip("-").replace("_", "-").lower()
        shown = [name for action in self._actions if action.help is not argparse.SUPPRESS
                 for name in action.option_strings]  # fmt: skip
        known = {option.lstrip("-"): option for option in shown}
        elsewhere = [name for name, words in _ELSEWHERE.items() if name in shown and word in words.split()]
        near = [known[match] for match in difflib.get_close_matches(word, known, n=1)]
        begins = [option for text, option in known.items() if len(word) > 1 and text.startswith(word)]
        meant = elsewhere or ([known[word]] if word in known else begins[:1]) or near
        return f". Did you mean {meant[0]}?" if meant else ""


def _accepts(action: argparse.Action, word: str) -> bool:
    try:
        return callable(action.type) and action.type(word) is not None
    except argparse.ArgumentTypeError:
        return False
