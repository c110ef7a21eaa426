"""Remove waits from src/, one at a time, and check that the simulated accelerator finds each removal.

    python -m tests.simulated.mutations           # all of them: three minutes
    python -m tests.simulated.mutations "stage 2" # those that are found under this plan

A mutation is a snippet of a file and its replacement; a snippet that no longer occurs is an error. A mutation is found
if a race is reported, the numbers differ from those of the unmutated run, or the run fails.
"""

import importlib.machinery
import importlib.util
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

from tests.kit import seeds
from tests.kit.ranks import close_pool, on_ranks

SOURCE = Path(__file__).parents[2] / "src" / "partita"
NUM_RANKS, NUM_RANKS_ON_AXES = 2, 4


@dataclass(frozen=True)
class Mutation:
    """A change of one snippet of src/.

    ``old`` occurs once in the file. ``plan`` is a key of ``PLANS``, ``AXES`` or ``NODES`` in
    :mod:`tests.simulated.training`. With ``saves``, training saves a checkpoint and resumes from it.
    """

    file: str
    old: str
    new: str
    plan: str
    saves: bool = False

    @property
    def text(self) -> str:
        """The mutated text of the file.

        Raises:
            LookupError: the snippet does not occur exactly once.
        """
        text = (SOURCE / self.file).read_text()
        if text.count(self.old) != 1:
            raise LookupError(f"{self.file}: occurs {text.count(self.old)} times, not once: {self.old!r}")
        return text.replace(self.old, self.new)


MUTATIONS = (
    Mutation(
        "memory/streams.py",
        "return record(self._device, keeps=work)",
        "return Event(keeps=work)",
        "stage 3",
    ),
    Mutation(
        "memory/streams.py",
        "            task.wait()\n            accelerator.wait_for_event(done, self._device)",
        "            task.wait()",
        "optimizer on host",
    ),
    Mutation(
        "memory/streams.py",
        "                accelerator.record_event(done, self._device)\n",
        "",
        "all on host",
    ),
    Mutation("activation/inputs.py", "            computed.wait()\n", "", "inputs on host"),
    Mutation("activation/inputs.py", "            free.wait()\n", "", "inputs on host"),
    Mutation("activation/inputs.py", "        back.ready.wait()\n", "", "inputs on host"),
    Mutation("activation/inputs.py", "        self._offloaded.wait()\n", "", "inputs on host"),
    Mutation("memory/tiers.py", "            finish(self._device)\n", "", "all on disk"),
    Mutation("memory/tiers.py", "slot.last_use = record_for_host(self._device)", "pass", "bf16, optimizer on host"),
    Mutation("sharding/unit.py", "            slot.last_use.wait()\n", "", "stage 3"),
    Mutation(
        "sharding/unit.py",
        "            updated.wait()\n            gathers",
        "            gathers",
        "optimizer on host",
    ),
    Mutation(
        "sharding/unit.py",
        "                begun.finish()\n",
        "                pass\n",
        "stage 3",
    ),
    Mutation("sharding/unit.py", "        self.gathered.wait()\n", "", "optimizer on host, stage 1"),
    Mutation(
        "sharding/unit.py",
        "give_back(self.slot, record(self._resources.device))",
        "give_back(self.slot, Event())",
        "stage 3",
    ),
    Mutation("sharding/publish.py", "            updated.wait()\n            ends", "            ends", "stage 1"),
    Mutation("sharding/publish.py", "                published.wait()\n", "                pass\n", "stage 1"),
    Mutation(
        "sharding/publish.py",
        "                unit.await_update(published)\n",
        "                unit.updated = published\n",
        "stage 1 between nodes",
    ),
    Mutation(
        "sharding/publish.py",
        "            event.wait()\n            work()",
        "            work()",
        "optimizer on host, stage 1",
    ),
    Mutation("sharding/gradient_buffer.py", "        slot.last_use.wait()\n", "", "stage 2"),
    Mutation("sharding/reducer.py", "awaited = [record(self._device), *(slot", "awaited = [*(slot", "stage 2"),
    Mutation("sharding/reducer.py", "slot in (scratch, sums) if", "slot in (scratch,) if", "in backward"),
    Mutation("sharding/reducer.py", "            self._launched.wait()\n", "            pass\n", "stage 2"),
    Mutation("sharding/reducer.py", "release_sent(sent, self._launched)", "release_sent(sent, Event())", "stage 2"),
    Mutation("sharding/reducer.py", "partial(after, awaited, run)", "partial(after, [], run)", "stage 0"),
    Mutation("sharding/reducer.py", "                gathered.wait()\n", "                pass\n", "stage 0"),
    Mutation("optim/updates.py", "        ready.wait()\n", "", "in backward"),
    Mutation("optim/segment_update.py", "        record_for_host(device).wait()\n", "", "optimizer on host, stage 1"),
    Mutation("checkpoint/format/file.py", "        finish(self._device)\n", "", "stage 3", saves=True),
    Mutation("checkpoint/format/file.py", "            finish(device)\n", "", "saved while training waits", saves=True),
    Mutation(
        "comm/transport.py",
        'group=self._groups["gradients"], async_op=True).wait()',
        'group=self._groups["gradients"], async_op=True)',
        "stage 2",
    ),
    Mutation(
        "comm/transport.py",
        "list(sent), group=self._groups[connections], async_op=True).wait()",
        "list(sent), group=self._groups[connections], async_op=True)",
        "sequence",
    ),
    Mutation(
        "comm/transport.py",
        "_all_reduce(total, group=self._groups[connections], async_op=True).wait()",
        "_all_reduce(total, group=self._groups[connections], async_op=True)",
        "tensor",
    ),
    Mutation(
        "parallel/pipeline/edges.py",
        '_wait(self.group.receive(values, self._before, "forward", PURPOSE), "forward")',
        'self.group.receive(values, self._before, "forward", PURPOSE)',
        "pipeline",
    ),
    Mutation(
        "parallel/pipeline/edges.py",
        '_wait(self.group.receive(gradients, self._behind, "backward", PURPOSE), "backward")',
        'self.group.receive(gradients, self._behind, "backward", PURPOSE)',
        "pipeline, zero bubble",
    ),
    Mutation(
        "parallel/pipeline/edges.py",
        '            _wait(self._sent_back.pop(0), "what was sent")\n',
        "            self._sent_back.pop(0)\n",
        "pipeline",
    ),
    Mutation(
        "inspection/full_tensors.py",
        "Interpreter(self._collectives).run(ops, shard, full)",
        "Interpreter(self._collectives).begin(ops, shard, full)",
        "bf16, optimizer on host",
    ),
    Mutation(
        "sharding/interpreter.py",
        "running.wait()  # the previous gather is the source of this one\n",
        "pass\n",
        "changes",
    ),
)


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, text: str) -> None:
        super().__init__(name, path)
        self._text = text

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._text, self.path, "exec")


class _Finder:
    """Import hook that loads one module with mutated text."""

    def __init__(self, mutation: Mutation) -> None:
        parts = Path(mutation.file).with_suffix("").parts
        self._name, self._path, self._text = ".".join(("partita", *parts)), SOURCE / mutation.file, mutation.text

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != self._name:
            return None
        loader = _Loader(name, str(self._path), self._text)
        return importlib.util.spec_from_file_location(name, self._path, loader=loader)


def run(mutation: Mutation | None, plan: str, saves: bool, folder: str) -> tuple[Any, list[str]]:
    """Run a plan on this rank; return its result and the races."""
    assert "partita" not in sys.modules, "the process has imported what is to be mutated"
    if mutation is not None:
        sys.meta_path.insert(0, _Finder(mutation))  # type: ignore[arg-type]
    from tests.simulated import training

    call: Sequence[Any] = (training.train_on_axes, training.AXES.get(plan))
    if plan in training.NODES:
        trained: tuple[Any, list[str]] = training.on_nodes(training.simulated, training.train, training.NODES[plan])
        return trained
    if plan in training.PLANS:
        call = (training.resume, training.PLANS[plan], folder) if saves else (training.train, training.PLANS[plan])
    return training.simulated(*call)


def outcome(mutation: Mutation | None, plan: str, saves: bool, folder: Path) -> list[tuple[Any, list[str]]]:
    from tests.simulated.training import AXES, NODES  # the ranks must not have imported it

    num_ranks = NUM_RANKS_ON_AXES if plan in {**AXES, **NODES} else NUM_RANKS
    close_pool()
    try:
        return on_ranks(num_ranks, run, mutation, plan, saves, str(folder), with_group=False)
    finally:
        close_pool()


def found(mutation: Mutation, folder: Path) -> str:
    """Return how a mutation was found, or "" if it was not."""
    from tests.simulated.training import same  # the ranks must not have imported it

    expected = outcome(None, mutation.plan, mutation.saves, folder / "expected")
    assert not any(races for _, races in expected), expected
    try:
        results = outcome(mutation, mutation.plan, mutation.saves, folder / "mutated")
    except Exception as error:  # a mutation can cause any error
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    races = [race for _, found in results for race in found]
    if races:
        return f"{len(races)} races: {races[0]}"
    pairs = zip(results, expected, strict=True)
    return "" if all(same(mine, theirs) for (mine, _), (theirs, _) in pairs) else "other numbers"


def main() -> int:
    num_lost = 0
    seeds.chosen()  # sets the seed in the environment: the same for all ranks
    chosen = [mutation for mutation in MUTATIONS if not sys.argv[1:] or mutation.plan in sys.argv[1:]]
    for mutation in chosen:
        with tempfile.TemporaryDirectory() as folder:
            how = found(mutation, Path(folder))
        num_lost += not how
        removed = " ".join(mutation.old.split())
        sys.stdout.write(
            f"{'found' if how else 'LOST '}  {mutation.file}: {removed}  ({mutation.plan})\n       {how}\n"
        )
        sys.stdout.flush()
    sys.stdout.write(f"{len(chosen) - num_lost} of {len(chosen)} found\n")
    return 1 if num_lost else 0


if __name__ == "__main__":
    sys.exit(main())
