"""Calls TensorFlow's graph optimizer, Grappler, and protects sums from it.

TensorFlow optimizes a graph just before it runs it. There is no public API to get the optimized graph without
running it, nor to exclude one sum from the optimization.
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
    "sums that the graph optimizer joins are summed in an order that depends on timing",
)


# The optimizer sets this attribute on a sum that it has created by merging sums, and does not merge it again.
_JOINED = "_grappler_ArithmeticOptimizer_AddOpsRewriteStage"


def sum_in_order(values: Sequence[Any]) -> Any:
    """Sums tensors from the first to the last, with the same bits in every run.

    `tf.add_n` of three or more tensors does not guarantee the order: its kernel starts with the first tensor
    whose memory it can reuse, which depends on timing. A sum of two has only one result, but the graph
    optimizer merges nested sums into one. So each sum of two is marked as already merged.

    Args:
        values: at least one tensor, all of one shape; one for each replica, for example.
    """
    import tensorflow as tf

    total = tf.add_n(values[:1])
    for value in values[1:]:
        total = tf.add_n([total, value])
        if not tf.executing_eagerly():
            SET_ATTRIBUTE.resolve()(total.op, _JOINED, tf.compat.v1.AttrValue(b=True))
    return total


def optimized(graph: Any, wanted: Sequence[Any]) -> Any:
    """Optimizes a graph as TensorFlow does before a run: inlines functions, fuses operations and so on.

    Args:
        graph: a `tf.Graph`, which is not changed.
        wanted: the operations and tensors of the graph that must be computed; they keep their names.

    Returns:
        A new `tf.Graph`.
    """
    import tensorflow as tf

    v1 = tf.compat.v1
    meta = v1.MetaGraphDef(graph_def=graph.as_graph_def())
    meta.collection_def["train_op"].node_list.value.extend(each.name for each in wanted)
    config = v1.ConfigProto()
    # Without a description of the machine, the optimizer assumes too little memory, and trades time for it.
    config.graph_options.rewrite_options.memory_optimization = 1  # NO_MEM_OPT
    found = OPTIMIZE_GRAPH.resolve()(config, meta, verbose=False)
    made = tf.Graph()
    with made.as_default():
        tf.import_graph_def(found, name="")
    return made
