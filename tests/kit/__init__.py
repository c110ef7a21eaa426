"""The test kit: helpers for ranks, models, plans, training and engine state.

A test on 4 ranks:

    from tests.kit import CASES, PLANS, assert_same_bits, on_ranks, train

    def stage_3_trains_as_stage_0() -> None:
        assert_same_bits(train(CASES["llama"], PLANS["3"]), train(CASES["llama"], PLANS["0"]))

    def test_stage_3_trains_as_stage_0() -> None:
        on_ranks(4, stage_3_trains_as_stage_0)

`on_ranks` calls a function on 4 processes of a pool and returns their results in rank order. The processes are reused
by later tests.

- The function must be at the top level of its module. Arguments and results are pickled.
- A default gloo process group is initialized; `with_group=False` leaves this to `partita.initialize`.
- Random numbers differ between ranks. `seeds.start()` makes them equal, e.g. before a model is built; `Case.build` does
  so by itself. `PARTITA_TEST_SEED=number make test` repeats the random numbers of another run.
- An error on a rank is raised in the test, with the rank and its traceback; after a hang, every rank's stack is shown.
- Warnings are errors, also on ranks. A test that leaves a process, a thread or an environment variable behind fails
  (`hygiene.py`). Modules stay imported: a test must undo its patches to them.

Modules:

- `ranks.py`, `worker.py`: `on_ranks`, processes as ranks.
- `threads.py`: `on_threads`, threads of this process as ranks, on any mesh, without a process group.
- `models.py`: `CASES`, models of each kind with batches and losses; `tiny(name, **sizes)`, a case in another size;
  `Stack`, an MLP, with `inputs` and `square_loss`.
- `plans.py`: `PLANS`, full configs; `ZERO`, `zero` sections; `matrix` and `sampled`, for parametrized tests of which
  `make test` runs a sample.
- `training.py`: `train`, `train_reference` in plain PyTorch; `assert_same_bits`, `assert_close`, `assert_exact`;
  `Recipe` and `check` for models with their own loss; `train_engine` and `train_module` for other loops.
- `state.py`: `assert_idle` checks that no resource of an engine is in use; `attached_to` lists a model's hooks.
- `live_bytes.py`: `LiveBytes` counts the bytes of live tensors.
- `seeds.py`: the seeds of this run.

Helpers for one package are in that package's folder. Names are imported on first use: some tests change partita's
source, so each process of the pool must import it itself.
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
