"""Recognition of a checkpoint's model and optimizer keys, and the choice among copies of the weights."""

import re
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from partita import PartitaError
from partita.checkpoint.backend import Stored, StoredTensor
from partita.checkpoint.format.stored import StoredFiles
from partita.checkpoint.names import Names, model_keys

WEIGHTS = ("first.weight", "blocks.0.weight", "blocks.0.norm.weight", "norm.weight")
ADAM = ("exp_avg", "exp_avg_sq")


def stored(*keys: str, paths: dict[str, tuple[str | int, ...]] | None = None) -> Stored:
    tensor = StoredTensor((1,), torch.float32)
    return StoredFiles(Path("folder"), dict.fromkeys(keys, tensor), paths=paths or {})


def below(prefix: str, names: Iterable[str] = WEIGHTS) -> list[str]:
    return [f"{prefix}.{name}" if prefix else name for name in names]


def states(optimizer: str, names: Iterable[str] = WEIGHTS) -> list[str]:
    return [f"{optimizer}.state.{name}.{state}" for name in names for state in ADAM]


def nested(*copies: str) -> dict[str, tuple[str | int, ...]]:
    """Return the paths of weights saved as ``{copy: state dict}``."""
    return {f"{copy}.{name}": (copy, name) for copy in copies for name in WEIGHTS}


@pytest.mark.parametrize(
    ("keys", "prefix", "chosen"),
    [
        (below("model"), None, "model."),
        (below(""), None, ""),
        (below("net"), None, "net."),
        (below("ema") + below("model"), None, "model."),
        (below("app.ema") + below("app.model"), None, "app.model."),
        (below("ema") + below("model", WEIGHTS[:-1]), None, "model."),
        (below("model") + below("model.teacher"), None, "model."),
        ([*below("model.model"), "model.head.weight"], None, "model.model."),
        (below("ema") + below("model"), "ema", "ema."),
        (below("ema") + below("model"), "ema.", "ema."),
        (below("ema") + below(""), "", ""),
        (below("model.encoder") + below("model.decoder"), "model.decoder", "model.decoder."),
    ],
)
def test_the_copy_that_is_meant(keys: list[str], prefix: str | None, chosen: str) -> None:
    for order in (keys, keys[::-1]):
        names = Names(stored(*order, *states("optim")), WEIGHTS, prefix)
        for name in WEIGHTS:
            key = chosen + name
            assert names.model([name]) == (key if key in keys else None)
        if not chosen:
            assert names.unexpected == []


@pytest.mark.parametrize(
    "copies", [("a", "b"), ("", "ema"), ("model.encoder", "model.decoder"), ("a.model", "b.model")]
)
def test_several_copies_are_an_error_that_lists_them(copies: tuple[str, ...]) -> None:
    keys = [key for copy in copies for key in below(copy)]
    listed = ", ".join(f"'{copy}'" for copy in sorted(copies))
    with pytest.raises(PartitaError, match=re.escape(f"holds 2 copies of the weights, under {listed}: choose one")):
        Names(stored(*keys), WEIGHTS)


def test_a_prefix_that_is_not_there() -> None:
    there = stored(*below("model"), *below("ema"))
    for choose in (lambda: Names(there, WEIGHTS, "emma"), lambda: model_keys(there, "emma")):
        with pytest.raises(PartitaError, match="no weights of the model under 'emma'"):
            choose()


@pytest.mark.parametrize("backwards", [False, True])
def test_the_usual_optimizer_of_several(backwards: bool) -> None:
    keys = [*below("model"), *states("optimizer"), *states("best_optim")]
    names = Names(stored(*(reversed(keys) if backwards else keys)), WEIGHTS)
    for name in WEIGHTS:
        assert names.states([name]) == {state: f"optimizer.state.{name}.{state}" for state in ADAM}


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("optimizer", ["optimizer", "optim", "app.optim", "adam"])
def test_modules_named_as_an_optimizer_names_things(optimizer: str, flat: bool) -> None:
    odd = ("state.0.weight", "state.head.weight", "param_groups.weight", "head.weight", "optim.state.a.weight", "head")
    rest = "first.weight.lr" if flat else "0.lr"
    keys = [*below("model", odd), *states(optimizer, odd), f"{optimizer}.param_groups.{rest}"]
    there = stored(*keys)
    assert model_keys(there) == {name: f"model.{name}" for name in odd}
    names = Names(there, odd)
    for name in odd:
        assert names.model([name]) == f"model.{name}"
        assert names.states([name]) == {state: f"{optimizer}.state.{name}.{state}" for state in ADAM}


def test_a_model_at_the_top_level() -> None:
    """In a state dict without a prefix, ``model.`` is part of the parameters' names, as in transformers."""
    names = ("model.layers.0.weight", "lm_head.weight", "state.weight")
    there = stored(*names, *states("optim"), paths={name: (name,) for name in names})
    assert model_keys(there) == {name: name for name in names}
    assert [Names(there, names).model([name]) for name in names] == list(names)


def test_the_copy_that_is_exported() -> None:
    keys, paths = [*below("net"), *below("ema")], nested("net", "ema")
    with pytest.raises(PartitaError, match="under 'ema', 'net': choose one by its prefix, .*--prefix 'ema'"):
        model_keys(stored(*keys, paths=paths))
    assert model_keys(stored(*keys, paths=paths), "net") == {name: f"net.{name}" for name in WEIGHTS}
    assert model_keys(stored(*below("net"), paths=nested("net"))) == {name: f"net.{name}" for name in WEIGHTS}
    paths |= nested("model")
    assert model_keys(stored(*keys, *below("model"), paths=paths)) == {name: f"model.{name}" for name in WEIGHTS}
    assert model_keys(stored(*keys, paths=paths), "net.blocks") == {
        "0.weight": "net.blocks.0.weight",
        "0.norm.weight": "net.blocks.0.norm.weight",
    }


def test_states_of_several_optimizers() -> None:
    with pytest.raises(PartitaError, match=r"'first\.weight' under 'a', 'optim2', none .* load with only_model=True"):
        both = stored(*below("model"), *states("optim2"), *states("a"), "a.param_groups.0.lr")
        Names(both, WEIGHTS).states(WEIGHTS[:1])
    gan = stored(*below("model"), *states("optim_g", WEIGHTS[:2]), *states("optim_d", WEIGHTS[2:]))
    for name in WEIGHTS:
        assert len(Names(gan, WEIGHTS).states([name])) == 2
