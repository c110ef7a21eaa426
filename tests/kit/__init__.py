"""The test kit: ranks, models, plans, training and states.

A test on 4 ranks:

    from tests.kit import CASES, PLANS, assert_same_bits, on_ranks, train

    def stage_3_trains_as_stage_0() -> None:
        assert_same_bits(train(CASES["llama"], PLANS["3"]), train(CASES["llama"], PLANS["0"]))

    def test_stage_3_trains_as_stage_0() -> None:
        on_ranks(4, stage_3_trains_as_stage_0)

`on_ranks` calls a function on 4 processes of a pool, which stay from test to test, and returns what each of them
returned, in rank order.

- The function is at the top level of its module. Arguments and results are pickled.
- A default gloo process group is there; `with_group=False` leaves it to `partita.initialize`.
- Random numbers differ between ranks. `seeds.start()` makes them equal, e.g. before a model is built; `Case.build` does
  so by itself. `PARTITA_TEST_SEED=number make test` draws the numbers of another run again.
- An error on a rank is raised in the test, with the rank and its traceback; a hang ends in every rank's stack.
- Warnings are errors, on the ranks, too. A process, a thread or an environment variable that a test leaves behind fails
  it (`hygiene.py`). Modules stay imported: what a test patches there it must put back.

In the modules:

- `ranks.py`, `worker.py`: `on_ranks`, processes as ranks.
- `threads.py`: `on_threads`, threads of this process as ranks, on any mesh, without a process group.
- `models.py`: `CASES`, models of each kind with batches and losses; `tiny(name, **sizes)`, a case in another size;
  `Stack`, an MLP, with `inputs` and `square_loss`.
- `plans.py`: `PLANS`, whole configs; `ZERO`, `zero` sections; `matrix` and `sampled`, for tests of which `make test`
  runs a sample.
- `training.py`: `train`, `train_reference` in plain PyTorch; `assert_same_bits`, `assert_close`, `assert_exact`;
  `Recipe` and `check` for models with a loss of their own; `train_engine` and `train_module` for other loops.
- `state.py`: `assert_idle`, nothing of an engine is in use; `attached_to`, what is attached to a model.
- `live_bytes.py`: `LiveBytes`, bytes of tensors that are alive.
- `seeds.py`: the random numbers of this run.

Helpers of one package stand in that package's folder. Names are imported when they are first used: the processes of the
pool, in which some tests change partita's source, import it for themselves.
"""

import importlib
from typing import Any

_MODULES = {
    "ranks": ("on_ranks",),
    "threads": ("on_threads",),
    "models": ("CASES", "Case", "Stack", "inputs", "parts", "square_loss", "tiny"),
    "plans": ("PLANS", "ZERO", "matrix", "sampled"),
    "training": (
        "Recipe",
        "Trained",
        "assert_close",
        "assert_exact",
        "assert_same_bits",
        "check",
        "train",
        "train_reference",
    ),
    "state": ("assert_idle", "attached_to"),
    "live_bytes": ("LiveBytes",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
