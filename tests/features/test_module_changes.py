"""Changes to modules by several features at once: they remain after engine.gathered, and close reverts them."""

import os
from itertools import combinations
from math import prod
from typing import Any

import pytest
import torch

import partita
from partita import PartitaError
from partita.activation.deferred_logits import DeferredLogits
from partita.engine import build
from tests.kit import seeds
from tests.kit.models import FAMILIES
from tests.kit.plans import sampled
from tests.kit.ranks import on_ranks
from tests.kit.state import attached_to
from tests.kit.training import rank

LENGTH, VOCAB, DROPOUT = 64, 32, 0.1
AXES = ("tensor", "sequence", "pipeline")
SPARSE = {"attention": {"pattern": "sliding", "window": 8, "block": 8}}
TILED = {"loss": {"tiled": 4 * VOCAB * 5}}
RECOMPUTED = {"activations": {"checkpoint": "units"}}
FEATURES: dict[str, dict[str, Any]] = {
    "sparse attention": {"parallel": {"tensor": 2}, **SPARSE},
    "recomputed MLP": {"parallel": {"tensor": 2}, "activations": {"checkpoint": ["*.mlp"]}},
    "MLP in tiles": {"parallel": {"tensor": 2}, "tiled": {"mlp": ["LlamaMLP"]}},
    "tiled loss, tensor": {"parallel": {"tensor": 2}, **TILED},
    "tiled loss, sequence": {"parallel": {"sequence": 2}, **TILED},
    "all, tensor": {"parallel": {"tensor": 2}, "zero": {"stage": 3}, **SPARSE, **TILED, **RECOMPUTED},
    "all, sequence": {"parallel": {"sequence": 2}, "zero": {"stage": 3}, **SPARSE, **TILED, **RECOMPUTED},
}
PIPELINE = {"parallel": {"pipeline": 2, "schedule": "zero_bubble"}, "batch": {"accumulate": 2}, **TILED, **RECOMPUTED}
STAGES = {"parallel": {"pipeline": 2}, "batch": {"accumulate": 2}}
# Each changes the modules in another way. Two entries that set a key to different values are not combined.
SINGLE: dict[str, dict[str, Any]] = {
    "tensor": {"parallel": {"tensor": 2}},
    "sequence": {"parallel": {"sequence": 2}},
    "stages": {**STAGES, "parallel": {"pipeline": 2, "schedule": "1f1b"}},
    "stages, weights apart": {**STAGES, "parallel": {"pipeline": 2, "schedule": "zero_bubble"}},
    "random streams": {"seed": 7},
    "16 bits": {"precision": {"compute": "bf16", "mode": "mixed"}},
    "16 bits, cast": {"precision": {"compute": "bf16", "mode": "cast", "keep_fp32": ["lm_head"]}},
    "sharded": {"zero": {"stage": 3}},
    "sparse attention": SPARSE,
    "recomputed units": RECOMPUTED,
    "MLP in tiles": {"tiled": {"mlp": ["LlamaMLP"]}},
    "tiled loss": TILED,
}


def merged(one: Any, other: Any) -> Any:
    if not isinstance(one, dict):
        assert one == other, f"{one} is not {other}"
        return one
    alike = {key: merged(one[key], other[key]) for key in one.keys() & other.keys()}
    return {**one, **other, **alike}


def pairs() -> list[tuple[str, str]]:
    found = []
    for one, other in combinations(SINGLE, 2):
        try:
            merged(SINGLE[one], SINGLE[other])
        except AssertionError:
            continue
        found.append((one, other))
    return found


SAMPLE = (
    ("tensor", "sequence"),
    ("stages, weights apart", "tiled loss"),
    ("stages", "16 bits"),
    ("random streams", "sparse attention"),
    ("16 bits, cast", "recomputed units"),
    ("sharded", "MLP in tiles"),
)


def llama(dropout: float = 0.0) -> Any:
    seeds.start()
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    return FAMILIES["llama"](vocab_size=VOCAB, use_cache=True, attention_dropout=dropout, **shape)


def run(engine: partita.Engine, step: int) -> tuple[float, int, bool]:
    """Train a step. Return its loss, the number of saved tensors, and True if the loss was computed in tiles."""
    ids = torch.randint(VOCAB, (1, LENGTH), generator=seeds.generator(step))
    num_kept = 0

    def count(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal num_kept
        num_kept += 1
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        output = engine(input_ids=ids, labels=ids, use_cache=False)
    engine.backward(output.loss)
    engine.step()
    return output.loss.item(), num_kept, isinstance(output.logits, DeferredLogits)


def train(config: dict[str, Any], *, gathers: bool) -> list[tuple[float, int, bool]]:
    """Train three steps; with ``gathers``, gather all parameters after the first. Check that close reverts all."""
    model = llama()
    before = attached_to(model)
    with partita.initialize(model, config) as engine:
        found = [run(engine, 0)]
        put_on = attached_to(model)
        if gathers:
            with engine.gathered(model), engine.gathered(model.model.layers[0]):
                pass
        assert attached_to(model) == put_on
        found += [run(engine, step) for step in (1, 2)]
        engine.close(whole=True)
    check_left(model, before)
    return found


def goes_on_after_gathered(config: dict[str, Any]) -> None:
    assert train(config, gathers=True) == train(config, gathers=False)


@pytest.mark.parametrize("name", FEATURES)
def test_training_goes_on_after_gathered(name: str) -> None:
    on_ranks(2, goes_on_after_gathered, FEATURES[name], with_group=False)


def tiles_inside_gathered() -> None:
    """Check that inside engine.gathered one rank alone can compute the full head's loss in tiles."""
    for axis in ("tensor", "sequence"):
        model = llama()
        ids = torch.randint(VOCAB, (1, LENGTH), generator=seeds.generator(0))
        expected = model(input_ids=ids, labels=ids).loss
        with partita.initialize(model, {"parallel": {axis: 2}, **TILED}) as engine:
            with engine.gathered(model):
                if rank() == 0:
                    output = model(input_ids=ids, labels=ids, use_cache=False)
                    assert isinstance(output.logits, DeferredLogits)
                    torch.testing.assert_close(output.loss, expected)


def test_tiles_inside_gathered() -> None:
    on_ranks(2, tiles_inside_gathered, with_group=False)


def pipelined() -> None:
    model = llama()
    before = attached_to(model)
    ids = torch.randint(VOCAB, (1, LENGTH), generator=seeds.generator(0))
    with partita.initialize(model, PIPELINE) as engine:
        losses = [engine.train_batch([{"input_ids": ids, "labels": ids}] * 2).item() for _ in range(2)]
        model.lm_head.compile(backend="eager")  # a tiled head, which returns placeholders outside its stage
        losses.append(engine.train_batch([{"input_ids": ids, "labels": ids}] * 2).item())
    assert losses == sorted(losses, reverse=True)
    for module in model.modules():  # modules that the user compiled remain compiled
        vars(module).pop("_compiled_call_impl", None)
    torch.compiler.reset()
    left = {said for said in attached_to(model) if not said.endswith("Placeholder []")}
    changed = {said.split(":")[0] for said in left - before}
    assert not {name for name in changed if not name.endswith((".weight", ".bias"))}, changed


def test_a_pipeline_is_compiled_and_taken_off() -> None:
    on_ranks(2, pipelined, with_group=False)


def losses_of_batches(config: dict[str, Any], *, gathers: bool) -> list[float]:
    """Return the losses of three batches, with all parameters gathered after each if ``gathers``; close reverts all."""
    model = llama(DROPOUT if "seed" in config else 0.0)
    before = attached_to(model)
    ids = torch.randint(VOCAB, (1, LENGTH), generator=seeds.generator(0))
    batch = [{"input_ids": ids, "labels": ids}] * config.get("batch", {}).get("accumulate", 1)
    losses = []
    with partita.initialize(model, config) as engine:
        for _ in range(3):
            losses.append(engine.train_batch(batch).item())
            engine._parts.updater.wait_for_updates()  # until then parameters are placeholders
            put_on = attached_to(model)
            if gathers:
                with engine.gathered(model), engine.gathered(model.model.layers[0]):
                    pass
            check_left(model, put_on)
        engine.close(whole=True)
    check_left(model, before)
    return losses


def check_left(model: torch.nn.Module, before: set[str]) -> None:
    """Check that the model's attachments are those before, except on parameters whose values are on other stages."""
    lost = tuple(f"{name}: " for name, param in model.named_parameters() if param.is_meta)
    left, before = ({each for each in found if not each.startswith(lost)} for found in (attached_to(model), before))
    assert left == before, f"still there: {sorted(left - before)}; gone: {sorted(before - left)}"


def change_together(config: dict[str, Any]) -> None:
    losses = losses_of_batches(config, gathers=False)
    assert losses == losses_of_batches(config, gathers=True)
    assert len(set(losses)) == 3
    fails_late(config, "ReplicaCheck")


@pytest.mark.parametrize(("one", "other"), sampled(pairs(), *SAMPLE))
def test_pairs_of_features(one: str, other: str) -> None:
    """The model is restored after close and after a failed initialize, and training continues after gathered."""
    config = merged(SINGLE[one], SINGLE[other])
    on_ranks(
        max(2, prod(config.get("parallel", {}).get(axis, 1) for axis in AXES)),
        change_together,
        config,
        with_group=False,
    )


def fails_late(config: dict[str, Any], where: str) -> None:
    """Check that all ranks restore their models if one rank fails after the features were applied."""
    model = llama()
    before = attached_to(model)
    values = {name: value.clone() for name, value in model.state_dict().items()}

    class FailsError(Exception):
        pass

    def fail(*args: Any) -> None:
        raise FailsError("late")

    own, is_failing = getattr(build, where), os.environ["RANK"] == "1"
    try:
        if is_failing:
            setattr(build, where, fail)
        with pytest.raises(FailsError if is_failing else PartitaError, match="late"):
            partita.initialize(model, config)
    finally:
        setattr(build, where, own)
    check_left(model, before)
    # Tensor and pipeline ranks keep only their part of the values, and 16-bit compute rounds them.
    if not (config.get("parallel", {}).keys() & {"tensor", "pipeline"} or "precision" in config):
        assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
        partita.initialize(model, config).close()


@pytest.mark.parametrize("where", ["Pipeline", "ReplicaCheck"])
def test_a_start_that_fails_late(where: str) -> None:
    for name in ("all, tensor", "all, sequence"):
        on_ranks(2, fails_late, FEATURES[name], where, with_group=False)


def test_a_head_that_is_compiled_later_has_its_loss_in_tiles() -> None:
    losses = []
    for compiles in (False, True):
        model = llama()
        with partita.initialize(model, TILED) as engine:
            run(engine, 0)
            if compiles:
                model.lm_head.compile(backend="eager")
            found = [run(engine, step) for step in (1, 2)]
            assert all(is_tiled for _, _, is_tiled in found)
            losses.append([loss for loss, _, _ in found])
    torch.compiler.reset()
    assert losses[0] == losses[1]
