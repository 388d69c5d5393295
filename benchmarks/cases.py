"""What `speed.py` compares: the rows of its table, each with its sides and what is aimed at.

Plain data; how it is measured is `speed.py`'s.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

Starter = Literal["alone", "pair", "workers", "mpirun", "launch", "launch --mpi", "torch"]


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of those that are compared in a case.

    Attributes:
        title: for the table.
        starter: what starts its processes: nobody, `workers.py` as a job or apart ("pair"), the MPI's own
            starter, `dtrain launch`, or `workers.py` with the peers' Python ("torch").
        program: file and arguments; `{network}` and `{address}` are filled in.
        processes: how many.
        data: what `fit` is given: "arrays" or "tf.data"; or what else the program measures.
    """

    title: str
    starter: Starter
    program: tuple[str, ...]
    processes: int = 1
    data: str = "arrays"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A row for each side but the first, with which it is compared.

    Attributes:
        title: for the table.
        network: in `networks.py`.
        steps: of an epoch; None takes the network's.
        sides: by name; the first is dtrain.
        aims: by a side's name, how many times faster than it dtrain is to be; where it may be slower, less
            than one.
        together: rows of their own, by name, each with the sides whose times are added.
    """

    title: str
    network: str
    sides: dict[str, Side]
    aims: dict[str, float] = field(default_factory=dict)
    together: dict[str, tuple[str, ...]] = field(default_factory=dict)
    steps: int | None = None


def _fit(side: str, strategy: str, *more: str) -> tuple[str, ...]:
    return ("train_keras.py", side, strategy, "{network}", "{address}", *more)


_XLA_LOOP = Side(
    title="loop of an epoch in one XLA program",
    starter="alone",
    program=("train_xla.py", "{network}", "{address}"),
)


def _one_device(data: str, network: str = "tiny") -> Case:
    call = data if data in ("evaluate", "predict") else "fit"
    more = {"XLA loop": _XLA_LOOP} if data == "arrays" else {}
    return Case(
        title=f"one device, {data}, {network}",
        network=network,
        steps=2000,
        sides={
            "dtrain": Side(
                title=f"{call}, OneDeviceStrategy",
                starter="alone",
                program=_fit("dtrain", "one_device"),
                data=data,
            ),
            "dtrain default": Side(
                title=f'{call}, dtrain.strategy("default")',
                starter="alone",
                program=_fit("dtrain", "default"),
                data=data,
            ),
            "stock fit": Side(
                title=f"stock Keras, {call}", starter="alone", program=_fit("stock", "default"), data=data
            ),
            **more,
        },
        aims={"stock fit": 10.0, "XLA loop": 1 / 1.5},
    )


_STOCK_LOOP = Side(
    title="stock TensorFlow, loop in the graph",
    starter="workers",
    program=("train_loop.py", "multi_worker", "{network}", "{address}", "--pinned"),
    processes=2,
)
_STOCK_LOOP_OF_ARRAYS = replace(
    _STOCK_LOOP,
    title="stock TensorFlow, loop in the graph, from the same arrays",
    program=(*_STOCK_LOOP.program, "--arrays"),
)
_STOCK_FIT = Side(
    title="stock Keras, fit",
    starter="workers",
    program=_fit("stock", "multi_worker", "--pinned"),
    processes=2,
)
_DDP = Side(
    title="PyTorch DDP over gloo",
    starter="torch",
    program=("train_torch.py", "{network}", "{address}"),
    processes=2,
)
_PAIR = Side(
    title="fit, two processes that know nothing of each other",
    starter="pair",
    program=_fit("dtrain", "one_device", "--pinned"),
    processes=2,
)
_ALL_REDUCE = Side(
    title="60 lines: loop in the graph, one MPI.Allreduce",
    starter="mpirun",
    program=("train_allreduce.py", "{network}", "{address}"),
    processes=2,
)
_LIMIT = replace(
    _ALL_REDUCE,
    title="60 lines: each trains apart, MPI sums what lies ready",
    program=(*_ALL_REDUCE.program, "--limit"),
)


def _workers(
    network: str, transport: str, aims: dict[str, float], *, peers: bool = True, steps: int | None = None
) -> Case:
    ours = Side(
        title=f"fit, two workers, {transport}",
        starter="launch --mpi" if transport == "mpi" else "launch",
        program=_fit("dtrain", "multi_worker", "--pinned", "--communication", transport),
        processes=2,
    )
    sides = {"dtrain": ours, "pair": _PAIR, "60 lines": _ALL_REDUCE, "stock loop": _STOCK_LOOP}
    if peers:
        sides |= {"stock loop, arrays": _STOCK_LOOP_OF_ARRAYS, "DDP": _DDP, "stock fit": _STOCK_FIT}
    title = f"two workers over {transport}, {network}"
    return Case(title=title, network=network, sides=sides, aims=aims, steps=steps)


def _with_mpi_limit(case: Case) -> Case:
    """A case, and what MPI takes for its bytes: alone, and in the simplest program that also trains."""
    sides = case.sides | {"limit": _LIMIT, "MPI": replace(_LIMIT, title="MPI.Allreduce alone", data="sum")}
    aims = case.aims | {"pair and MPI": 1 / 1.05}
    return replace(case, sides=sides, aims=aims, together={"pair and MPI": ("pair", "MPI")})


def _more_workers(number: int) -> Case:
    """A job of so many workers, for its processor time: they may be more than the cores."""
    two = _workers("mid", "mpi", {}, peers=False)
    sides = {
        name: replace(
            two.sides[name], processes=number, title=two.sides[name].title.replace("two", str(number))
        )
        for name in ("dtrain", "pair", "stock loop")
    }
    title = f"{number} workers over mpi, mid"
    return Case(title=title, network="mid", sides=sides, aims={}, steps=60)


CASES = {
    "one-arrays": _one_device("arrays"),
    "one-arrays-small": _one_device("arrays", "small"),
    "one-tf.data": _one_device("tf.data"),
    "one-evaluate": _one_device("evaluate"),
    "one-predict": _one_device("predict"),
    "mirrored": Case(
        title="two logical CPUs",
        network="tiny",
        steps=500,
        sides={
            "dtrain": Side(
                title="fit, MirroredStrategy", starter="alone", program=_fit("dtrain", "mirrored")
            ),
            "stock fit": Side(
                title="stock Keras, fit", starter="alone", program=_fit("stock", "mirrored")
            ),
        },
        aims={"stock fit": 3.0},
    ),
    "small-mpi": _workers("small", "mpi", {"60 lines": 1 / 1.15, "stock loop": 5.0, "DDP": 6.0}),
    "mid-mpi": _workers("mid", "mpi", {"pair": 1 / 1.03, "stock loop": 1.0, "DDP": 2.0}),
    "big-mpi": _with_mpi_limit(_workers("big", "mpi", {"stock loop": 3.0, "DDP": 1.6}, steps=120)),
    "small-ring": _workers("small", "ring", {}, peers=False),
    "mid-ring": _workers("mid", "ring", {}, peers=False),
    "big-ring": _workers("big", "ring", {"stock loop": 2.5}, peers=False, steps=120),
    **{f"mid-mpi-{number}": _more_workers(number) for number in (2, 4, 8)},
}  # fmt: skip
