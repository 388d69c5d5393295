"""How the changes of blocks, and those of callbacks between them, come together in the chief's variables."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from dtrain.engine.parameter_server.held_variables import HeldVariables


def held(*values: Any) -> tuple[list[tf.Variable], HeldVariables]:
    variables = [tf.Variable(value) for value in values]
    return variables, HeldVariables(variables, "CPU:0")


def test_a_block_starts_from_what_finished_blocks_and_callbacks_left() -> None:
    (total, count), state = held(1.0, np.int64(3))
    first = state.values()
    state.add(first, [np.float32(1.1), np.int64(5)])
    # Nothing is assigned before the chief asks for it, but the next block has it.
    assert (float(total), int(count)) == (1.0, 3)
    assert [value.tolist() for value in state.values()] == [np.float32(1.1).item(), 5]
    state.assign()
    assert (total.numpy(), int(count)) == (np.float32(1.1), 5)
    total.assign(0.0)
    assert [value.tolist() for value in state.values()] == [0.0, 5]


def test_blocks_that_run_at_the_same_time_are_summed() -> None:
    (count,), state = held(np.int64(10))
    first, second = state.values(), state.values()
    state.add(first, [np.int64(12)])
    state.add(second, [np.int64(13)])
    assert state.values()[0] == 15
    state.assign()
    state.assign()
    assert int(count) == 15


def test_what_is_reset_while_a_block_runs_has_that_block_afterwards() -> None:
    (count,), state = held(np.int64(10))
    finished, running = state.values(), state.values()
    state.add(finished, [np.int64(12)])
    count.assign(0)
    later = state.values()
    assert later[0] == 2
    state.add(running, [np.int64(13)])
    state.add(later, [np.int64(6)])
    state.assign()
    assert int(count) == 2 + 3 + 4


def test_what_a_block_does_not_change_stays_as_a_callback_left_it() -> None:
    (broken, text, flag), state = held(np.float32(np.nan), "a", False)
    given = state.values()
    broken.assign(0.0)
    text.assign("b")
    flag.assign(True)
    state.add(given, [np.float32(np.nan), np.asarray(b"a", object), np.asarray(False)])
    state.assign()
    assert (float(broken), text.numpy(), bool(flag)) == (0.0, b"b", True)


def test_of_values_that_are_no_numbers_the_last_one_counts() -> None:
    (text,), state = held("a")
    given = state.values()
    text.assign("b")
    state.add(given, [np.asarray(b"c", object)])
    state.assign()
    assert text.numpy() == b"c"
