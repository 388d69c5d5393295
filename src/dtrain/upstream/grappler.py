"""TensorFlow's own graph optimizer, by hand.

A session or a function applies it just before it runs a graph; there is no public way to see a graph as it
will run without running it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dtrain.upstream.reach import Reach

OPTIMIZE_GRAPH = Reach(
    module="tensorflow.python.grappler.tf_optimizer", name="OptimizeGraph",
    signature=(
        "(config_proto, metagraph, verbose=True, graph_id=b'graph_to_optimize', cluster=None, "
        "strip_default_attributes=False)"
    ),
    reason="what a step keeps in memory is decided by the graph that runs, not by the one that was traced",
)  # fmt: skip

REACHES: tuple[Reach, ...] = (OPTIMIZE_GRAPH,)


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
