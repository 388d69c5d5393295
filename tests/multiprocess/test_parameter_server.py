"""Training on parameter servers with two workers: counts exact, updates whole, mistakes named.

All cases of a run of the tests are in one cluster, for starting TensorFlow takes longer than they do; each is
then a test of its own, so that a failure names it. Half of them are among the long tests.
"""

from __future__ import annotations

from typing import Any

import pytest
from tests.contract.rotation import lot

from dtrain.errors import ClusterConfigError
from parameter_server_cases.registry import listed
from parameter_server_cases.running import Finished, run_cases
from refusals import refused

LIMIT = 1200.0

# The first test waits for all cases.
pytestmark = pytest.mark.timeout(LIMIT + 60)


@pytest.fixture(scope="module")
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """What the cases that are asked for have left."""
    chosen = [
        item.callspec.params
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    ]
    names = [params["name"] for params in chosen if "name" in params]
    folder = tmp_path_factory.mktemp("cases")
    return run_cases(folder, limit=LIMIT, options=("--only", ",".join(names)))


def _halved(names: list[str]) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.long] * (lot(name) % 2)) for name in names]


@pytest.mark.parametrize("name", _halved(listed()))
def test_case(name: str, finished: Finished) -> None:
    finished.check(name)


def test_all_processes_end_well(finished: Finished) -> None:
    assert finished.status == 0, finished.output[-5000:]


def test_without_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    from dtrain import ParameterServerStrategy

    monkeypatch.delenv("TF_CONFIG", raising=False)
    with refused(ClusterConfigError, "TF_CONFIG", "dtrain launch --workers 2 --ps 1 script.py"):
        ParameterServerStrategy()
