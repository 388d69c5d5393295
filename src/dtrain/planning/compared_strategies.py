"""The strategies that a plan compares: what they are called, what makes each, and which keep the numbers."""

from __future__ import annotations

DATA_PARALLEL, FULLY_SHARDED, IN_HOSTS = "data parallel", "fully sharded", "sharded in hosts"
SERVERS, DILOCO = "parameter servers", "DiLoCo"
STRATEGIES = {
    DATA_PARALLEL: 'dtrain.strategy("multi_worker")',
    FULLY_SHARDED: 'dtrain.strategy("fully_sharded")',
    IN_HOSTS: 'dtrain.strategy("fully_sharded", within="host")',
    SERVERS: 'dtrain.strategy("parameter_server")',
    DILOCO: 'dtrain.strategy("multi_worker", gradient_hook=dtrain.DiLoCo())',
}
"""The strategies that a plan compares, and what makes each."""

# Under these, training has the numbers of one device with the same global batch.
SAME_NUMBERS = (DATA_PARALLEL, FULLY_SHARDED, IN_HOSTS)
