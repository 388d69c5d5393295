"""The `dtrain` command itself: fast, without TensorFlow, and one clear message for every mistake."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from dtrain import cli
from dtrain.cli.parser import Parser
from dtrain.environments.gpus import visible_gpus
from dtrain.errors import ConfigurationError
from dtrain.launch import launch_local
from dtrain.recipes import RECIPES, RecipeOptions
from dtrain.recipes.catalogue import SyntheticOptions, TextCsvOptions
from refusals import refused

IN_FRESH_PYTHON = """
import sys
from dtrain.cli import main
status = main(sys.argv[1:])
heavy = sorted({"tensorflow", "keras", "numpy", "sklearn", "matplotlib"} & set(sys.modules))
sys.stderr.write(f"imported: {heavy}")
sys.exit(status)
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True)


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], *([name, "--help"] for name in cli.COMMANDS)]
)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    done = run("-c", IN_FRESH_PYTHON, *arguments)
    assert done.returncode == 0
    assert done.stdout
    assert done.stderr == "imported: []"


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("dtrain la", ["launch"]),
        ("dtrain launch --w", ["--workers"]),
        ("dtrain train di", ["digits"]),
        ("dtrain train digits --strategy mu", ["multi_worker"]),
        ("dtrain report file", ["file.txt"]),
        ("dtrain no", []),
    ],
)
def test_completion_in_a_shell(typed: str, offered: list[str], tmp_path: Path) -> None:
    (tmp_path / "file.txt").touch()
    done = subprocess.run(
        [sys.executable, "-c", IN_FRESH_PYTHON.replace("sys.argv[1:]", ""), "is not looked at"],
        cwd=tmp_path,
        env={
            **os.environ,
            "_ARGCOMPLETE": "1",
            "_ARGCOMPLETE_IFS": "\n",
            "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "reported"),
            "COMP_LINE": typed,
            "COMP_POINT": str(len(typed)),
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "reported").read_text().split() == offered


def test_launching_and_meeting_import_no_tensorflow() -> None:
    modules = (
        "dtrain.task.channel, dtrain.process_group.serving, dtrain.launch, dtrain.launch.spawn, "
        "dtrain.environments.topology"
    )
    done = run("-c", f"import sys, {modules}; print({{'tensorflow', 'keras'}} & set(sys.modules))")
    assert done.stdout == "set()\n", done.stderr


def test_the_help_names_the_commands() -> None:
    done = run("-m", "dtrain", "--help")
    assert done.returncode == 0
    assert "launch" in done.stdout and "train" in done.stdout


def test_version() -> None:
    assert run("-m", "dtrain", "--version").stdout.startswith("dtrain ")


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "commands:" in capsys.readouterr().err


def test_unknown_command_suggests_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["lauch"]) == 2
    assert "Did you mean 'launch'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["launch"], "required: script. See dtrain launch --help"),
        (["launch", "-n", "0", "a.py"], "'0' is not an integer of at least 1"),
        (
            ["launch", "--num-workers", "2", "a.py"],
            "there is no option --num-workers. Did you mean --workers?",
        ),
        (["launch", "--module", "a"], "Did you mean -m?"),
        (["help", "lauch"], "there is no command 'lauch'. Did you mean 'launch'? Choose from"),
        (["report", "--out", "a.html", "runs"], "there is no option --out. Did you mean --output?"),
        (["bench", "--strategy", "mirrored"], "Did you mean --strategies?"),
        (["bench", "--epochs", "1"], "The number of epochs is 1, but"),
        (["launch", "--workers", "0", "a.py"], "'0' is not an integer of at least 1"),
        (["launch", "--workers", "two", "a.py"], "'two' is not an integer"),
        (["launch", "--workers", "2"], "script"),
        (["launch", "--workers", "2", "--devices-per-worker", "-1", "a.py"], "--devices-per-worker"),
        (["launch", "--worker", "2", "a.py"], "--worker"),
        (["launch", "--workers", "2", "/no/such/script.py"], "There is no script '/no/such/script.py'"),
        (["launch", "--workers", "1", "--ps", "0", "a.py"], "'0' is not an integer of at least 1"),
        (["launch", "--workers", "1", "--ps", "-1", "a.py"], "--ps"),
        (["launch", "--workers", "1", "--ps", "1", "--max-restarts", "x", "a.py"], "'x' is not an integer"),
        (["launch", "--workers", "3:2", "a.py"], "'3:2' is not MIN:MAX: 3 is more than 2"),
        (["launch", "--workers", "0:2", "a.py"], "'0:2' is not MIN:MAX: '0' is not an integer of at least 1"),
        (["launch", "--workers", "2:", "a.py"], "'2:' is not MIN:MAX: '' is not an integer"),
        (["launch", "--workers", "a:b", "a.py"], "'a:b' is not MIN:MAX"),
        (["launch", "--workers", "1:2", "--ps", "1", __file__], "with parameter servers a lost worker"),
        (["launch", "--workers", "1:2", "--max-restarts", "0", __file__], "max_restarts is 0"),
        (["launch", "--workers", "2", "--spares", "-1", "a.py"], "'-1' is not an integer of at least 0, and"),
        (
            ["launch", "--workers", "2", "--spares", "1", "--ps", "1", __file__],
            "spares is 1, but the job has",
        ),
        (["launch", "--workers", "2", "--hang-timeout", "0", "a.py"], "'0' is not a positive number of sec"),
        (["launch", "--workers", "2", "--hang-timeout", "soon", "a.py"], "'soon' is not a positive number"),
        (["launch", "--workers", "2", "--grace", "inf", "a.py"], "'inf' is not a positive number"),
        (
            ["launch", "--workers", "1", "--ps", "1", "--devices-per-worker", "2", __file__],
            "a worker of parameter servers has one device",
        ),
        (["doctor", "--wait", "abc"], "'abc' is not a number of seconds up to"),
        (["submit", "--slurm", "--nodes", "x", "a.py"], "'x' is not a number of hosts such as 4, or MIN-MAX"),
        (["--no-such-option"], "--no-such-option"),
    ],
)
def test_bad_arguments_give_a_message_and_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    shown = capsys.readouterr().err
    assert said in shown


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_type_of_an_option_says_itself_what_it_refuses(command: str) -> None:
    parser = Parser()
    importlib.import_module(cli.COMMANDS[command]).add_arguments(parser)
    for action in parser._actions:
        if callable(action.type) and action.type not in (int, float):  # the parser has words for these two
            with contextlib.suppress(argparse.ArgumentTypeError):
                action.type("no such value")


TRAIN = ["train", "synthetic", "--strategy", "multi_worker"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["train", "digits", "--limit", "5"],
            ["--limit is 5, but the recipe 'digits' has", "cifar10"],
        ),
        (
            ["train", "imdb", "--image-size", "32"],
            ["no such option", "--image-size is an option of synthetic"],
        ),
        (["train", "sinthetic"], ["'sinthetic' is not known", "Did you mean 'synthetic'?", "text-csv"]),
        ([*TRAIN, "--precision", "mixed_float61"], ["'mixed_float61'", "Did you mean 'mixed_float16'?"]),
        ([*TRAIN, "--precision", "bf16"], ["'bf16'", "Did you mean 'mixed_bfloat16'?"]),
        ([*TRAIN, "--precision", "half"], ["'half'", "Did you mean 'mixed_float16'?"]),
        ([*TRAIN, "--scaling", "linaer"], ["The scaling 'linaer'", "Did you mean 'linear'?", "sqrt"]),
        ([*TRAIN, "--model", "cnm"], ["The model 'cnm'", "Did you mean 'cnn'?", "transformer"]),
        ([*TRAIN, "--model", "transformer", "--image-size", "8"], ["The image size is 8"]),
        ([*TRAIN, "--vocabulary", "9"], ["The vocabulary is 9, but a cnn has none", "--model transformer"]),
        (
            [*TRAIN, "--model", "transformer", "--classes", "9999"],
            ["The number of classes is 9999", "only 10000 words", "--vocabulary to 10001"],
        ),
        ([*TRAIN, "--width", "20"], ["The width is 20", "multiple of 8"]),
        ([*TRAIN, "--size", "0"], ["The size is 0"]),
        ([*TRAIN, "--accumulation", "0"], ["The accumulation is 0"]),
        ([*TRAIN, "--global-batch", "64", "--accumulation", "3"], ["not a multiple of 3", "3 micro-batches"]),
        (
            [*TRAIN, "--global-batch", "64", "--per-replica-batch", "16", "--accumulation", "3"],
            ["not a multiple of 48", "16 examples per replica"],
        ),
        ([*TRAIN, "--base-batch", "64"], ["the scaling is 'none'", "--scaling linear"]),
        ([*TRAIN, "--epochs", "3", "--warmup", "3"], ["The warm-up is 3 epochs, and the whole training 3"]),
        ([*TRAIN, "--learning-rate", "-1"], ["The learning rate is -1.0"]),
        ([*TRAIN, "--epoch", "3"], ["there is no option --epoch. Did you mean --epochs? See dtrain train"]),
        (["train", "--epoch", "3", "digits"], ["there is no option --epoch. Did you mean --epochs?"]),
        ([*TRAIN, "--lr", "0.1"], ["there is no option --lr. Did you mean --learning-rate?"]),
        ([*TRAIN, "--lr=0.1"], ["Did you mean --learning-rate?"]),
        ([*TRAIN, "--batch-size", "32"], ["Did you mean --global-batch?"]),
        ([*TRAIN, "--batch_size=32"], ["Did you mean --global-batch?"]),
        ([*TRAIN, "-epochs", "3"], ["Did you mean --epochs?"]),
        ([*TRAIN, "--epochs", "many"], ["argument --epochs: 'many' is not an integer. See"]),
        ([*TRAIN, "--learning-rate", "low"], ["'low' is not a number"]),
        ([*TRAIN, "--epochs"], ["argument --epochs: a value is missing"]),
        ([*TRAIN, "--epochs", "0"], ["The number of epochs is 0, which is below 1"]),
        (
            ["train", "digits", "--strategy", "ddp"],
            ["'ddp'", "Did you mean 'multi_worker'? Choose from default"],
        ),
        (["train", "text-csv"], ["'text-csv' trains on a file of yours", "--data FILE.csv"]),
        (["train", "cifar10", "--model", "small", "--width", "8"], ["the model 'small' has one size"]),
    ],
)
def test_what_a_recipe_cannot_take(
    arguments: list[str], said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    shown = capsys.readouterr().err
    for words in said:
        assert words in shown


def launch_train(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`dtrain train` in two workers, from `folder`."""
    command = [sys.executable, "-m", "dtrain", "train", *arguments, "--strategy", "multi_worker"]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder)


@pytest.mark.parametrize(
    ("recipe", "content", "said"),
    [
        ("imdb", None, ["IMDb was not found", "aclImdb_v1.tar.gz", "DTRAIN_DATA_DIR"]),
        ("cifar10", b"no archive", ["cifar-10-python.tar.gz"]),
        ("text-csv", b"title,text,label\na,b\xff,1\n", ["is not utf-8", "encoding"]),
        ("text-csv", b"title,body,label\na,b,1\n", ["text", "body"]),
    ],
)
def test_bad_data_is_said_before_processes_start(
    tmp_path: Path, recipe: str, content: bytes | None, said: list[str]
) -> None:
    path = tmp_path / {"cifar10": "cifar-10-python.tar.gz"}.get(recipe, "data.csv")
    if content is not None:
        path.write_bytes(content)
    before = list(tmp_path.iterdir())
    done = launch_train(tmp_path, recipe, "--data", str(path))
    assert done.returncode == 2
    assert done.stderr.startswith("dtrain: error: ") and "\nHint: " in done.stderr
    for words in said:
        assert words in done.stderr
    assert "worker" not in done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == before


@pytest.mark.parametrize("name", ["text-csv", "text_csv"])
def test_the_help_of_a_recipe_shows_its_own_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", name, "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--label-column" in shown and "--global-batch" in shown and "--workers" in shown
    assert "--image-size" not in shown and "10000" in shown
    assert cli.main(["train", "--help"]) == 0
    assert "--image-size" in capsys.readouterr().out


def test_options_become_arguments_and_options_again() -> None:
    options = SyntheticOptions(
        model="transformer", epochs=4, warmup=0.5, accumulation=2, run_dir="-odd", scaling="sqrt", width=64
    )
    assert SyntheticOptions.parse(options.to_arguments()) == options
    for recipe in RECIPES.values():
        if recipe.options is not TextCsvOptions:
            assert recipe.options.parse([]) == recipe.options()


@pytest.mark.parametrize(
    ("options", "replicas", "sizes"),
    [
        ({}, 3, (64, 64, 1)),  # as even as it goes
        ({"accumulation": 4}, 2, (64, 16, 4)),
        ({"per_replica_batch": 8}, 2, (16, 16, 1)),
        ({"per_replica_batch": 8, "accumulation": 3}, 2, (48, 16, 3)),
        ({"per_replica_batch": 8, "global_batch": 64}, 2, (64, 16, 4)),
        ({"per_replica_batch": 8, "global_batch": 64, "accumulation": 4}, 2, (64, 16, 4)),
    ],
)
def test_two_sizes_decide_the_third(
    options: dict[str, int], replicas: int, sizes: tuple[int, int, int]
) -> None:
    found = RecipeOptions(**options).batches(replicas)
    assert (found.global_batch, found.micro_batch, found.accumulation) == sizes


@pytest.mark.parametrize(
    ("options", "replicas", "named"),
    [
        ({"global_batch": 1}, 2, ("batch is 1", "2 replicas", "2 or more")),
        ({"global_batch": 4, "accumulation": 4}, 2, ("4 in 4", "2 replicas", "8")),
        ({"accumulation": 5}, 1, ("64", "5 micro-batches", "60 or 65")),
        ({"global_batch": 64, "per_replica_batch": 32}, 3, ("64", "of 32", "3 replicas", "96")),
        ({"global_batch": 64, "per_replica_batch": 8, "accumulation": 2}, 2, ("64", "of 8", "of 2", "32")),
    ],
)
def test_sizes_that_contradict_each_other(
    options: dict[str, int], replicas: int, named: tuple[str, ...]
) -> None:
    with refused(ConfigurationError, *named):
        RecipeOptions(**options).batches(replicas)


def fake_command(monkeypatch: pytest.MonkeyPatch, outcome: object) -> None:
    def run(args: object) -> int:
        if isinstance(outcome, BaseException):
            raise outcome
        return int(str(outcome))

    module = types.ModuleType("fake_command")
    module.__dict__.update(HELP="fake", add_arguments=lambda parser: None, run=run)
    monkeypatch.setitem(sys.modules, "fake_command", module)
    monkeypatch.setitem(cli.COMMANDS, "fake", "fake_command")


def test_a_dtrain_error_is_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_command(monkeypatch, ConfigurationError("what was found", hint="what to do"))
    assert cli.main(["fake"]) == 2
    assert capsys.readouterr().err == "dtrain: error: what was found\nHint: what to do\n"


def test_other_errors_keep_their_traceback_between_the_message_twice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_command(monkeypatch, ZeroDivisionError("a defect"))
    with pytest.raises(ZeroDivisionError, match="a defect"):  # Python shows it, with the message at its end
        cli.main(["fake"])
    assert capsys.readouterr().err == "dtrain: error: ZeroDivisionError: a defect\n"


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["help"], ["--help"]),
        (["help", "launch"], ["launch", "--help"]),
        (["help", "train", "imdb"], ["train", "imdb", "--help"]),
        (["version"], ["--version"]),
        (["-V"], ["--version"]),
    ],
)
def test_help_and_version_are_commands_too(
    words: list[str], options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 0
    shown = capsys.readouterr().out
    assert cli.main(options) == 0
    assert shown and capsys.readouterr().out == shown


def test_the_help_names_the_strategies_and_models(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["train", "--help"], ["train", "cifar10", "--help"], ["bench", "--help"]):
        assert cli.main(command) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert "one_device, mirrored, multi_worker" in shown, command
    assert cli.main(["train", "--help"]) == 0
    assert "of cifar10 (resnet or small), imdb (" in " ".join(capsys.readouterr().out.split())


def test_launch_takes_all_gpus_or_else_two_workers_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "null"):
        (tmp_path / name).touch()
    assert visible_gpus(tmp_path) == ["0", "1", "10"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, GPU-8a")
    assert visible_gpus(tmp_path) == ["2", "GPU-8a"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert visible_gpus(tmp_path) == []

    script = tmp_path / "show.py"
    script.write_text("import os; print(os.environ['CUDA_VISIBLE_DEVICES'])")
    done = run("-m", "dtrain", "launch", str(script))
    assert sorted(done.stdout.splitlines()) == ["[worker 0] -1", "[worker 1] -1"]
    assert done.stderr.startswith("dtrain launch: 2 workers (no GPU was found; --workers sets the number)\n")

    given: dict[str, Any] = {}
    monkeypatch.setattr("dtrain.environments.gpus.visible_gpus", lambda: ["2", "GPU-8a"])
    monkeypatch.setattr("dtrain.launch.launch_local", lambda command, **said: launched(given, command, said))
    assert cli.main(["launch", str(script)]) == 0
    assert (given["workers"], given["gpus"]) == (2, ["2", "GPU-8a"])
    assert given["shown"] == ["[worker 0] 2", "[worker 1] GPU-8a"]


def launched(given: dict[str, Any], command: list[str], said: dict[str, Any]) -> int:
    """Launches it, and keeps what was said and shown."""
    shown = io.StringIO()
    status = launch_local(command, **said, stdout=shown)
    given |= {**said, "shown": sorted(shown.getvalue().splitlines())}
    return status


def test_status_and_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_command(monkeypatch, 7)
    assert cli.main(["fake"]) == 7
    fake_command(monkeypatch, KeyboardInterrupt())
    assert cli.main(["fake"]) == 130


def test_arguments_of_the_script_are_its_own(tmp_path: Path) -> None:
    script = tmp_path / "show.py"
    script.write_text("import sys; print(sys.argv[1:])")
    done = run("-m", "dtrain", "launch", "--workers", "1", str(script), "--workers", "9", "--", "-m", "x")
    assert done.stdout == "[worker 0] ['--workers', '9', '--', '-m', 'x']\n"
    assert done.returncode == 0, done.stderr
