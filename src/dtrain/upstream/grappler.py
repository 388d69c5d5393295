"""TensorFlow's own graph optimizer, by hand.

A session or a function applies it just before it runs a graph; there is no public way to see a graph as it
will run without running it, nor to keep one sum as it was written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dtrain.upstream.reach import Reach

OPTIMIZE_GRAPH = Reach(
    "tensorflow.python.grappler.tf_optimizer:OptimizeGraph",
    "what a step keeps in memory is decided by the graph that runs, not by the one that was traced",
)

SET_ATTRIBUTE = Reach(
    "tensorflow.python.framework.ops:Operation._set_attr",
    "sums that the graph optimizer joins are added up in an order that depends on timing",
)


# The optimizer leaves this mark on a sum that it has made by joining others.
_JOINED = "_grappler_ArithmeticOptimizer_AddOpsRewriteStage"


def sum_in_order(values: Sequence[Any]) -> Any:
    """Adds up tensors of one shape from the first to the last, with the same bits in every run.

    `tf.add_n` of three and more does not promise that: its kernel puts the first tensor in front whose memory
    nobody else holds any more, and who still does at that moment is a matter of timing. A sum of two has one
    result, but the graph optimizer makes one sum of a sum of sums; so the sums of two are marked as if it had
    done so.

    Args:
        values: at least one; a sum for each replica, for example.
    """
    import tensorflow as tf

    total = tf.add_n(values[:1])
    for value in values[1:]:
        total = tf.add_n([total, value])
        if not tf.executing_eagerly():
            SET_ATTRIBUTE.resolve()(total.op, _JOINED, tf.compat.v1.AttrValue(b=True))
    return total


def optimized(graph: Any, wanted: Sequence[Any]) -> Any:
    """A graph as TensorFlow would run it: functions inlined, operations fused, constants computed.

    Args:
        graph: a `tf.Graph`.
        wanted: operations and tensors of it that are to be computed; they keep their names.

    Returns:
        A new `tf.Graph`.
    """
    import tensorflow as tf

    v1 = tf.compat.v1
    meta = v1.MetaGraphDef(graph_def=graph.as_graph_def())
    meta.collection_def["train_op"].node_list.value.extend(each.name for each in wanted)
    config = v1.ConfigProto()
    # Without a machine to look at it would take any for too small, and trade its memory for time.
    config.graph_options.rewrite_options.memory_optimization = 1  # NO_MEM_OPT
    found = OPTIMIZE_GRAPH.resolve()(config, meta, verbose=False)
    made = tf.Graph()
    with made.as_default():
        tf.import_graph_def(found, name="")
    return made
