"""What a user sees of a `fit`: where its time goes, the bar, alarms, and the files of a `Monitor`."""

from __future__ import annotations

import copy
import csv
import io
import json
import logging
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtrain
from dtrain import cli, monitor
from dtrain.checkpoint import session
from dtrain.checkpoint.storages import STORAGES
from dtrain.engine.callbacks import time_report
from dtrain.errors import ConfigurationError
from dtrain.monitor import Monitor
from dtrain.telemetry.events import PARTS
from dtrain.telemetry.training_clock import TrainingClock
from given_clock import GivenClock
from refusals import refused

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(640, 8)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
PAUSE = 0.4  # seconds


class Slow(keras.callbacks.Callback):  # type: ignore[misc]
    """Takes a while at the end of each epoch."""

    def __init__(self, clock: GivenClock, pause: float = PAUSE) -> None:
        super().__init__()
        self.clock, self.pause = clock, pause

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.clock.pass_by(self.pause)


class EveryBatch(keras.callbacks.Callback):  # type: ignore[misc]
    """Has each call make one step."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        pass


def make(strategy: str = "default", **options: Any) -> keras.Model:
    with dtrain.strategy(strategy).scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae"], **options)
    return model


def events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]


def said(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records if record.name == "dtrain")


def test_every_moment_is_counted_once() -> None:
    given = GivenClock()
    clock = TrainingClock(given)
    given.pass_by(1.0)
    clock.enter("compute")
    given.pass_by(2.0)
    clock.push("checkpoint")
    clock.enter("input")  # whatever begins within it
    assert clock.doing == "input"
    given.pass_by(4.0)
    assert clock.pop() == 4.0
    assert clock.doing == "compute"
    computing = clock.seconds()
    clock.enter("compute")
    given.pass_by(8.0)
    clock.move("compute", "communication", 3.0, since=computing)
    clock.move("compute", "communication", 99.0, since=clock.seconds())  # no more than there is since then
    clock.push("validation")
    clock.enter("compute")
    given.pass_by(16.0)
    clock.pop()
    given.pass_by(32.0)
    assert {part: seconds for part, seconds in clock.seconds().items() if seconds} == {
        "other": 1.0,
        "compute": 2.0 + 5.0 + 32.0,
        "checkpoint": 4.0,
        "communication": 3.0,
        "validation": 16.0,
    }


@pytest.mark.parametrize(
    "strategy", ["default", "mirrored", pytest.param("central_storage", marks=pytest.mark.long)]
)
def test_the_parts_add_up_to_the_wall_time(strategy: str, tmp_path: Path, training_time: Any) -> None:
    training_time.tick = 1e-3
    model = make(strategy)
    saving = keras.callbacks.ModelCheckpoint(str(tmp_path / "{epoch}.keras"))
    slow = Slow(training_time)
    begun = training_time.now()
    history = model.fit(
        X, Y, batch_size=32, epochs=3, validation_data=(X, Y), verbose=0, callbacks=[slow, saving]
    )
    wall = training_time.now() - begun
    report = history.time_report
    assert [each["epoch"] for each in report] == [0, 1, 2]
    # wall clock: parts are less than the whole, whose rest is before and after them
    assert 0.9 * wall < sum(each["seconds"] for each in report) <= wall
    for each in report:
        assert set(each["parts"]) == set(PARTS)
        assert sum(each["parts"].values()) == pytest.approx(each["seconds"], abs=1e-5)
        assert min(each["parts"].values()) >= 0.0
        assert (each["steps"], each["examples"]) == (20, 640)
        assert each["parts"]["callbacks"] > PAUSE
        assert each["callbacks"]["Slow"] == pytest.approx(PAUSE + 1e-3)
        assert each["callbacks"]["ModelCheckpoint"] > 0.0
        assert each["parts"]["checkpoint"] == pytest.approx(each["callbacks"]["ModelCheckpoint"], abs=1e-2)
        assert each["parts"]["validation"] > 0.0
    assert report[0]["parts"]["start"] > 0.0 == report[2]["parts"]["start"]


class Copied(keras.callbacks.Callback):  # type: ignore[misc]
    """Copies itself in `fit`, and notes for which object a hook is called."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[Copied] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.other = copy.copy(self)
        self.other.on_epoch_end(epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.called.append(self)


def test_a_copy_that_a_callback_makes_of_itself_calls_its_own_hooks() -> None:
    given = Copied()
    make().fit(X, Y, epochs=1, verbose=0, callbacks=[given])
    assert given.called == [given.other, given]


def test_fit_leaves_a_list_of_callbacks_as_it_was() -> None:
    model = make()
    given = keras.callbacks.CallbackList([Copied()], add_history=True, model=model)
    before = [*given.callbacks]
    model.fit(X, Y, epochs=1, verbose=0, callbacks=given)
    assert given.callbacks == before


def test_fit_prepares_a_list_of_callbacks_once_only() -> None:
    calls: list[str] = []

    class Prepared(keras.callbacks.Callback):  # type: ignore[misc]
        def set_model(self, model: Any) -> None:
            calls.append("set_model")
            super().set_model(model)

        def set_params(self, params: Any) -> None:
            calls.append("set_params")
            super().set_params(params)

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            """A hook that is timed."""

    model = make()
    given = keras.callbacks.CallbackList([Prepared()], add_history=True, model=model, epochs=1)
    before = [*calls]
    model.fit(X, Y, epochs=1, verbose=0, callbacks=given)
    assert before.count("set_model") == 1
    assert calls == before


def test_slow_callbacks_are_named_unless_the_fit_is_short(
    caplog: pytest.LogCaptureFixture, training_time: GivenClock
) -> None:
    history = make().fit(X, Y, epochs=1, verbose=0, callbacks=[Slow(training_time, 0.9)])
    assert history.time_report[0]["causes"] == [] and "Callbacks took" not in said(caplog)
    history = make().fit(X, Y, epochs=2, verbose=0, callbacks=[Slow(training_time, 3.1)])
    (line,) = [line for line in said(caplog).splitlines() if "Callbacks took" in line]
    # In the first epoch it took less than is worth a warning.
    assert line.startswith("Callbacks took 100% of the time of epoch 2 (3.10 s): Slow 3.10 s. Hint: ")
    assert [[(c["cause"], c["share"]) for c in each["causes"]] for each in history.time_report] == [
        [("callbacks", 1.0)]
    ] * 2


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch, training_time: GivenClock) -> Iterator[threading.Event]:
    """Each file of a checkpoint takes a while until it is on the disk, and none is before this event."""
    sync = STORAGES["file"].sync
    free = threading.Event()

    def slowly(path: str) -> None:
        free.wait()
        training_time.pass_by(PAUSE)
        sync(path)

    monkeypatch.setattr(STORAGES["file"], "sync", slowly)
    yield free
    free.set()


@pytest.mark.parametrize("save_freq", [pytest.param("epoch", marks=pytest.mark.long), 20])
def test_a_slow_disk_is_named(
    save_freq: Any,
    disk: threading.Event,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session, "_SLOW_SECONDS", 0.0)
    monkeypatch.setattr(time_report, "_LOST_SECONDS", 0.0)
    # With a number of steps, the checkpoint of step 20 is still being written when that of step 40 is due.
    free = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: epoch == 2 and disk.set())
    if save_freq == "epoch":
        disk.set()
    saving = dtrain.BackupAndRestore(tmp_path, save_freq=save_freq)
    history = make().fit(X, Y, epochs=4, verbose=0, callbacks=[saving, free])
    text = said(caplog)
    if save_freq != "epoch":  # in which part of the training the writing falls is the writer's own affair
        assert re.search(r"Writing the checkpoint of step \d+ to .* took \d+\.\d s .*a faster disk", text)
        return
    assert "Checkpoints took" in text and "BackupAndRestore" in text
    causes = [cause["cause"] for each in history.time_report for cause in each["causes"]]
    assert "checkpoint" in causes
    assert sum(each["parts"]["checkpoint"] for each in history.time_report) >= PAUSE


@pytest.fixture
def no_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has not imported what notebooks run in, in which the bar is drawn over itself."""
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)


@pytest.mark.usefixtures("no_notebook")
def test_the_bar_says_how_fast_and_how_long(capsys: pytest.CaptureFixture[str]) -> None:
    make().fit(X, Y, batch_size=32, epochs=2, validation_data=(X, Y))
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("Epoch")] == ["Epoch 1/2", "Epoch 2/2"]
    bars = [line for line in lines if "20/20 ━" in line]  # a slow epoch has lines before its last one
    assert len(bars) == 2  # a line an epoch where nothing can be written over
    pattern = r"20/20 ━{20} \d+s [\d.]+[mu]?s/step - [\d,.e+]+ examples/s( - data wait \d+%)? - loss: "
    for line in bars:
        assert re.match(pattern, line), line
        assert " - mae: " in line and " - val_loss: " in line and " - val_mae: " in line
        assert "examples_per_second" not in line


def test_how_much_is_shown_is_the_users_choice(capsys: pytest.CaptureFixture[str]) -> None:
    model = make()
    model.fit(X, Y, epochs=1, verbose=0)
    assert capsys.readouterr().out == ""
    model.fit(X, Y, epochs=1, verbose=2)
    (line,) = capsys.readouterr().out.splitlines()
    assert "examples/s" in line

    class Own(keras.callbacks.ProgbarLogger):  # type: ignore[misc]
        pass

    model.fit(X, Y, epochs=1, callbacks=[Own()])
    assert "examples/s" not in capsys.readouterr().out


TERMINAL = """
import os, pty, sys
status = pty.spawn([sys.executable, sys.argv[1]])  # its output is copied to this process' own
sys.exit(os.waitstatus_to_exitcode(status))
"""
PROGRAM = """
import time, keras, numpy as np, dtrain
with dtrain.strategy("default").scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.zeros((800, 4), "float32")
# Longer than it takes until the bar is drawn anew.
slow = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: time.sleep(0.02))
model.fit(x, x[:, :1], batch_size=16, epochs=2, callbacks=[slow])
"""


def test_a_terminal_has_one_line_that_changes(tmp_path: Path) -> None:
    (tmp_path / "terminal.py").write_text(TERMINAL)
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(tmp_path / "terminal.py"), str(tmp_path / "program.py")]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=120, check=True)
    text = done.stdout.decode(errors="replace")
    shown = [line for line in text.split("\n") if "━" in line or "─" in line]
    assert len(shown) == 2  # however often each was drawn
    redrawn = shown[0].split("\r")
    assert len(redrawn) > 2
    assert re.search(r"\d+s left, \d+s in all", text)
    numbers = [int(n) for n in re.findall(r"(\d+)/50", shown[0])]
    assert numbers == sorted(numbers) and numbers[-1] == 50


def test_a_loss_that_is_no_number_ends_training_if_that_is_wished(tmp_path: Path) -> None:
    model = make("mirrored")
    broken = Y.copy()
    broken[200] = np.nan
    with pytest.warns(UserWarning, match=r"The loss of epoch 1 is nan .*Hint: lower the learning rate"):
        history = model.fit(
            X,
            broken,
            batch_size=32,
            epochs=5,
            shuffle=False,
            verbose=0,
            callbacks=[Monitor(tmp_path / "run", on_nan="stop")],
        )
    assert history.epoch == [0]
    (alarm,) = [event for event in events(tmp_path / "run") if event["kind"] == "alarm"]
    assert (alarm["alarm"], alarm["epoch"], alarm["value"]) == ("nan", 0, None)


def test_a_jump_of_the_loss_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    jumping = Y.copy()
    jumping[320:352] += 1000.0
    with dtrain.strategy("default").scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1, kernel_initializer="zeros")])
        model.compile(keras.optimizers.SGD(1e-6), "mse")
    model.fit(X, jumping, batch_size=32, epochs=1, shuffle=False, verbose=0, callbacks=[EveryBatch()])
    lines = [line for line in said(caplog).splitlines() if "The loss jumped" in line]
    assert len(lines) == 1 and "in step 11 of epoch 1" in lines[0]
    caplog.clear()
    model.fit(X, Y, batch_size=32, epochs=3, shuffle=False, verbose=0, callbacks=[EveryBatch()])
    assert "The loss jumped" not in said(caplog)


def test_a_monitor_leaves_the_whole_record(tmp_path: Path) -> None:
    model = make("mirrored")
    watcher = Monitor(tmp_path / "run", histograms=1, profile=(5, 10), notes={"why": "to see"})
    model.fit(X, Y, batch_size=32, epochs=2, validation_data=(X, Y), verbose=0, callbacks=[watcher])
    path = tmp_path / "run"
    assert watcher.run is not None and watcher.run.path == path

    record = json.loads((path / "run.json").read_text())
    assert (record["version"], record["status"], record["strategy"]) == (1, "finished", "mirrored")
    assert (record["replicas"], record["epochs"], record["why"]) == (2, 2, "to see")
    assert record["final_metrics"].keys() == {"loss", "mae", "val_loss", "val_mae"}
    assert record["examples_per_second"] > 0.0 and set(record["time"]) == set(PARTS)

    found = events(path)
    assert [event["kind"] for event in found if event["kind"] != "steps"] == [
        "begin",
        "plan",
        "epoch",
        "epoch",
        "epoch",  # the last one again, with what came after it
        "end",
    ]
    assert found[0]["epochs"] == 2 and found[0]["version"] == 1
    plan = next(event for event in found if event["kind"] == "plan")
    assert (plan["rows"], plan["rounds"], plan["gathers"]) == (32, 1, 0) and plan["sums"] > 0
    last = found[-2]
    assert (last["epoch"], last["steps"], last["examples"]) == (1, 20, 640)
    assert last["logs"].keys() >= {"loss", "mae", "val_loss", "val_mae", "examples_per_second"}
    assert last["callbacks"]["Monitor"] > 0.0  # the curves
    assert found[-1]["status"] == "finished"

    with (path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["0", "1"] and float(rows[1]["examples_per_second"]) > 0.0
    assert (path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert list((path / "tensorboard").glob("plugins/profile/*/*.xplane.pb"))
    (board,) = (path / "tensorboard" / "train").glob("events.out.tfevents.*")
    tags = {
        value.tag
        for record in tf.data.TFRecordDataset(str(board))
        for value in tf.compat.v1.Event.FromString(record.numpy()).summary.value
    }
    assert "epoch_loss" in tags and any("kernel" in tag and "histogram" in tag for tag in tags)


def test_a_monitor_goes_on_in_its_directory(tmp_path: Path) -> None:
    model = make()
    watcher = Monitor(tmp_path / "run", tensorboard=False)
    for epoch in range(2):
        model.fit(X, Y, batch_size=32, initial_epoch=epoch, epochs=epoch + 1, verbose=0, callbacks=[watcher])
    with refused(ConfigurationError, "2 epochs", "epoch 1", initial_epoch=2):
        model.fit(X, Y, epochs=1, verbose=0, callbacks=[watcher])
    kinds = [event["kind"] for event in events(tmp_path / "run")]
    assert kinds.count("begin") == kinds.count("end") == 2
    assert len((tmp_path / "run" / "metrics.csv").read_text().splitlines()) == 3
    assert not (tmp_path / "run" / "tensorboard").exists()
    with refused(ConfigurationError, tmp_path / "run", "another run", "metrics.csv"):
        model.fit(X, Y, epochs=1, verbose=0, callbacks=[Monitor(tmp_path / "run")])


def test_a_monitor_makes_no_call_shorter(tmp_path: Path) -> None:
    calls = []

    class Counting(keras.callbacks.Callback):  # type: ignore[misc]
        dtrain_every_batch = False

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            calls.append(int(batch + 1))

    make().fit(
        X,
        Y,
        batch_size=1,
        epochs=2,
        verbose=0,
        callbacks=[Monitor(tmp_path / "run", profile=(1, 2)), Counting()],
    )
    assert len(calls) < 640


def test_a_fit_inside_of_another_has_a_record_of_its_own(tmp_path: Path) -> None:
    inner = make()

    class Probing(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            inner.fit(X[:64], Y[:64], epochs=1, verbose=0)

    watcher = Monitor(tmp_path / "run", tensorboard=False)
    history = make().fit(X, Y, batch_size=32, epochs=3, verbose=0, callbacks=[watcher, Probing()])
    found = [event for event in events(tmp_path / "run") if event["kind"] != "steps"]
    assert [event["kind"] for event in found] == ["begin", *["epoch"] * 4, "end"]
    assert [event["epoch"] for event in found[1:-1]] == [0, 1, 2, 2]
    assert {event["steps"] for event in found[1:-1]} == {20}
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["final_metrics"]["loss"] == pytest.approx(history.history["loss"][-1])


def test_the_report_tells_both_sizes_of_a_divided_model(tmp_path: Path) -> None:
    for run, strategy in {
        "divided": dtrain.FullyShardedStrategy(smallest=1),
        "whole": dtrain.MirroredStrategy(),
    }.items():
        with strategy.scope():
            model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1001)])
            model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
        model.fit(X, np.repeat(Y, 1001, 1), verbose=0, callbacks=[Monitor(tmp_path / run)])
        assert cli.main(["report", str(tmp_path / run), "--output", str(tmp_path / f"{run}.html")]) == 0
    kernel, bias, state = 4 * 8 * 1001, 4 * 1001, 12  # the step's number has 8 bytes, the rate 4
    sizes = json.loads((tmp_path / "divided" / "run.json").read_text())["divided"]
    assert sizes["parameters"] == {"whole": kernel + bias, "replica": kernel // 2 + bias}
    assert sizes["optimizer"] == {"whole": kernel + bias + state, "replica": kernel // 2 + bias + state}
    page = (tmp_path / "divided.html").read_text()
    assert page.count("36 kB, of which a replica holds 20 kB") == 2
    assert "divided" not in json.loads((tmp_path / "whole" / "run.json").read_text())
    assert "a replica holds" not in (tmp_path / "whole.html").read_text()


def test_a_fit_that_is_refused_leaves_nobody_listening(tmp_path: Path) -> None:
    model = make()
    two = [dtrain.BackupAndRestore(tmp_path / "a"), dtrain.BackupAndRestore(tmp_path / "b")]
    with refused(ConfigurationError, "2 callbacks"):
        model.fit(X, Y, verbose=0, callbacks=[Monitor(tmp_path / "first"), *two])
    model.fit(X, Y, verbose=0, callbacks=[Monitor(tmp_path / "second")])
    assert json.loads((tmp_path / "first" / "run.json").read_text())["status"] == "running"
    assert json.loads((tmp_path / "second" / "run.json").read_text())["status"] == "finished"


def test_steps_and_checkpoints_of_a_run_that_goes_on(tmp_path: Path) -> None:
    class Failing(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                raise RuntimeError("on purpose")

    for extra in ([Failing()], []):
        saving = dtrain.BackupAndRestore(tmp_path / "backup", save_freq=10)
        callbacks = [Monitor(tmp_path / "run", tensorboard=False), saving, *extra]
        broken = Y.copy()
        if not extra:
            broken[:] = np.nan
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = make()
            if extra:
                with pytest.raises(RuntimeError, match="on purpose"):
                    model.fit(X, Y, batch_size=32, epochs=4, verbose=0, callbacks=callbacks)
            else:
                model.fit(X, broken, batch_size=32, epochs=4, verbose=0, callbacks=callbacks)
    found = events(tmp_path / "run")
    saved = [event["step"] for event in found if event["kind"] == "checkpoint"]
    # One that is due while another is still written is saved at a later step.
    assert saved and min(saved) >= 10 and max(saved) <= 80
    (alarm,) = [event for event in found if event["kind"] == "alarm"]
    assert alarm["step"] > 10  # of training, not of this attempt


def test_a_callback_can_be_copied_while_it_is_timed() -> None:
    copies: list[Any] = []

    class Copying(keras.callbacks.Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[int] = []

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.seen.append(epoch)
            if self.model is not None:
                model, self._model = self._model, None
                copies.append(copy.deepcopy(self))
                self._model = model

    own = Copying()
    make().fit(X, Y, epochs=1, verbose=0, callbacks=[own])
    copies[0].on_epoch_end(7)
    assert (own.seen, copies[0].seen) == ([0], [0, 7])
    assert "on_epoch_end" not in vars(own)


@pytest.mark.usefixtures("no_notebook")
def test_a_stream_that_lacks_the_bars_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    history = make().fit(X, Y, epochs=1)
    stream.flush()
    assert history.epoch == [0]
    assert b"20/20 ????" in stream.buffer.getvalue()  # type: ignore[attr-defined]


def test_training_that_fails_says_so_in_its_events(tmp_path: Path) -> None:
    class Failing(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            raise RuntimeError("on purpose")

    model = make()
    with pytest.raises(RuntimeError, match="on purpose"):
        model.fit(X, Y, epochs=2, verbose=0, callbacks=[Monitor(tmp_path / "run"), Failing()])
    end = events(tmp_path / "run")[-1]
    assert set(end) == {"kind", "time", "status", "step", "process", "elapsed"}
    assert (end["kind"], end["status"], end["step"]) == ("end", "failed", 20)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "running"
    model.fit(X, Y, epochs=1, verbose=0)  # nobody listens any more
    assert events(tmp_path / "run")[-1]["kind"] == "end"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"histograms": -1}, "histograms=-1"),
        ({"histograms": 1, "tensorboard": False}, "tensorboard=False"),
        ({"profile": (0, 5)}, "profile=(0, 5)"),
        ({"profile": (9, 5)}, "profile=(9, 5)"),
        ({"on_nan": "panic"}, "on_nan is 'panic'"),
    ],
)
def test_what_a_monitor_cannot_do(options: dict[str, Any], says: str) -> None:
    with refused(ConfigurationError, says):
        Monitor(**options)


def test_a_monitor_that_fit_cannot_put_others_in_the_place_of() -> None:
    model = make()
    callbacks = keras.callbacks.CallbackList([Monitor()], add_history=True, model=model)
    with pytest.raises(ConfigurationError, match="that dtrain does not handle"):
        model.fit(X, Y, verbose=0, callbacks=callbacks)


def test_events_that_cannot_be_written_do_not_end_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "run" / "events.jsonl").mkdir(parents=True)
    (tmp_path / "run" / "events.jsonl").rename(tmp_path / "events")
    watcher = Monitor(tmp_path / "run")

    class Blocking(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_begin(self, logs: Any = None) -> None:
            (tmp_path / "events").rename(tmp_path / "run" / "events.jsonl")

    with caplog.at_level(logging.WARNING, logger="dtrain"):
        history = make().fit(X, Y, epochs=2, verbose=0, callbacks=[watcher, Blocking()])
    assert history.epoch == [0, 1]
    assert said(caplog).count("cannot be written") == 1


def test_names() -> None:
    assert {"Monitor", "ProgressBar", "on_chief"} <= set(monitor.__all__)
    assert monitor.on_chief(lambda: "made") == "made"
    with pytest.raises(AttributeError, match="nothing"):
        _ = monitor.nothing
