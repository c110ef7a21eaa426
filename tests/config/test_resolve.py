"""Resolution of a configuration for a number of ranks: mesh, batch, dtype, notices."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.config.load import load_config
from partita.config.resolve import Resolved, ResolvedBatch, describe, resolve
from partita.errors import ConfigError
from partita.table.mesh_shape import MeshShape


def resolved(
    config: dict[str, object], num_ranks: int = 4, device: str = "cpu", per_node: int | None = None
) -> Resolved:
    return resolve(load_config(config), num_ranks, device, per_node)


@pytest.mark.parametrize(
    ("given_batch", "expected"),
    [
        ({}, (1, 1, 4)),
        ({"micro": 3}, (3, 1, 12)),
        ({"accumulate": 3}, (1, 3, 12)),
        ({"total": 32}, (8, 1, 32)),
        ({"micro": 2, "accumulate": 3}, (2, 3, 24)),
        ({"micro": 2, "total": 24}, (2, 3, 24)),
        ({"accumulate": 3, "total": 24}, (2, 3, 24)),
        ({"micro": 2, "accumulate": 3, "total": 24}, (2, 3, 24)),
        ({"micro": "auto", "total": 4}, (1, 1, 4)),
    ],
)
def test_batch(given_batch: dict[str, object], expected: tuple[int, int, int]) -> None:
    assert resolved({"batch": given_batch}).batch == ResolvedBatch(*expected)


def squeezed(error: ConfigError) -> str:
    """Return the message without the alignment of its table."""
    return " ".join(str(error).split())


number = st.one_of(st.just("auto"), st.integers(1, 12))


@settings(max_examples=400, deadline=None)
@given(micro=number, accumulate=number, total=st.one_of(number, st.integers(1, 300)), data=st.integers(1, 9))
def test_batch_derivation(micro: int | str, accumulate: int | str, total: int | str, data: int) -> None:
    """Given values are kept, the total is the product, and an error is raised exactly if no whole numbers fit."""
    wanted = {"micro": micro, "accumulate": accumulate, "total": total}
    each = data * (1 if micro == "auto" else int(micro)) * (1 if accumulate == "auto" else int(accumulate))
    everything_given = micro != "auto" and accumulate != "auto"
    if total != "auto" and (int(total) != each if everything_given else int(total) % each != 0):
        with pytest.raises(ConfigError) as caught:
            resolved({"batch": wanted}, data)
        message = squeezed(caught.value)
        assert message.count("Fix: ") == 1
        assert f"ranks {data} number of ranks" in message
        assert f"batch.total {total} config" in message
        return
    batch = resolved({"batch": wanted}, data).batch
    assert batch.total == batch.micro * batch.accumulate * data
    for key, value in wanted.items():
        assert value in ("auto", getattr(batch, key))
    assert min(batch.micro, batch.accumulate, batch.total) >= 1
    if total == "auto":
        assert batch.micro == 1 or micro != "auto"
        assert batch.accumulate == 1 or accumulate != "auto"


@settings(max_examples=100, deadline=None)
@given(micro=st.integers(1, 12), total=st.integers(1, 300), data=st.integers(1, 9))
def test_the_fix_of_a_batch_error_is_right(micro: int, total: int, data: int) -> None:
    try:
        resolved({"batch": {"micro": micro, "total": total}}, data)
    except ConfigError as error:
        suggested = int(str(error).rsplit("Fix: set batch.total: ", 1)[1].rstrip("."))
        assert resolved({"batch": {"micro": micro, "total": suggested}}, data).batch.total == suggested
        assert abs(suggested - total) <= micro * data


def test_mesh_from_the_number_of_ranks() -> None:
    assert resolved({}, 6).mesh == MeshShape(data=6)
    assert resolved({"parallel": {"data": 6}}, 6).mesh == MeshShape(data=6)
    assert resolved({}, 1).mesh == MeshShape()


def test_mesh_with_every_axis() -> None:
    axes: dict[str, object] = {"tensor": 2, "pipeline": 3}
    assert resolved({"parallel": axes}, 24).mesh == MeshShape(pipeline=3, data=4, tensor=2)
    assert resolved({"parallel": axes, "batch": {"total": 8}}, 24).batch == ResolvedBatch(2, 1, 8)
    axes["sequence"] = 2
    with pytest.raises(ConfigError) as caught:
        resolved({"parallel": axes}, 30)
    message = squeezed(caught.value)
    assert "30 ranks cannot be divided by pipeline 3 x sequence 2 x tensor 2 = 12" in message
    assert "parallel.tensor 2 config" in message
    assert "ranks 30 number of ranks" in message
    assert "Fix: start a multiple of 12 ranks, such as 24; or set pipeline 3 x sequence 1 x tensor 2 or " in message
    with pytest.raises(ConfigError, match=r"= 24 ranks, but there are 30(.|\n)*Fix: start 24 ranks\."):
        resolved({"parallel": {**axes, "data": 2}}, 30)
    with pytest.raises(ConfigError, match=r"Fix: leave parallel\.data out; it follows"):
        resolved({"parallel": {**axes, "data": 2}}, 36)


HIERARCHICAL: dict[str, object] = {"zero": {"stage": 3, "hierarchical": True}}


def test_hierarchical_splits_the_data_axis_over_nodes() -> None:
    assert resolved(HIERARCHICAL, 8, per_node=4).mesh == MeshShape(data=8, node=2)
    assert resolved(HIERARCHICAL, 8, per_node=1).mesh == MeshShape(data=8, node=8)
    assert resolved({}, 8, per_node=4).mesh == MeshShape(data=8)
    for per_node in (None, 8):
        alone = resolved(HIERARCHICAL, 8, per_node=per_node)
        assert alone.mesh.node == 1
        assert alone.notices == ("ignored: zero.hierarchical (all data ranks are on one node)",)
    with pytest.raises(ConfigError, match="needs the same number of data ranks on every node") as caught:
        resolved(HIERARCHICAL, 8, per_node=3)
    assert "ranks on a node 3 launcher" in squeezed(caught.value)
    with pytest.raises(ConfigError, match="number of ranks on a node: expected a whole number of at least 1; got 0"):
        resolved(HIERARCHICAL, 8, per_node=0)


def test_codes_of_changes_between_nodes() -> None:
    coded = HIERARCHICAL | {"communication": {"parameters": "ternary"}}
    assert resolved(coded, 8, per_node=4).notices == ()
    assert resolved(coded, 8, per_node=8).notices == (
        "ignored: zero.hierarchical (all data ranks are on one node)",
        "ignored: communication.parameters (parameter deltas are sent between nodes: there is one)",
    )


@pytest.mark.parametrize(
    ("zero", "per_node", "held_alike"),
    [
        ({"stage": 1}, 8, True),
        ({"stage": 3}, 4, False),
        ({"stage": 3, "hierarchical": True}, 4, False),
        ({"stage": 3, "replicate": "nodes"}, 4, True),
    ],
)
def test_what_no_two_ranks_hold_is_not_compared(zero: dict[str, object], per_node: int, held_alike: bool) -> None:
    found = resolved({"zero": zero, "communication": {"check_every": 5}}, 8, per_node=per_node).notices
    ignored = "ignored: communication.check_every (no two ranks hold the same parameters)"
    assert found == (() if held_alike else (ignored,))


def test_ranks_on_several_nodes() -> None:
    assert [resolved({}, 8, per_node=per_node).spans_nodes for per_node in (None, 8, 4, 1)] == [
        False,
        False,
        True,
        True,
    ]


def test_replicas_are_nodes() -> None:
    replicated = {"zero": {"stage": 3, "replicate": "nodes"}}
    assert resolved(replicated, 8, per_node=4).mesh == MeshShape(data=8, node=2)
    assert "zero: stage 3, within each node" in describe(resolved(replicated, 8, per_node=4))
    alone = resolved(replicated, 8, per_node=8)
    assert (alone.mesh.node, alone.notices) == (1, ("ignored: zero.replicate (all data ranks are on one node)",))
    with pytest.raises(ConfigError, match="zero.replicate needs the same number of data ranks on every node"):
        resolved(replicated, 8, per_node=3)
    with pytest.raises(ConfigError, match="over the data ranks of a node, but each node has one") as caught:
        resolved(replicated, 8, per_node=1)
    assert "ranks on a node 1 launcher" in squeezed(caught.value)


def test_hierarchical_counts_the_inner_axes() -> None:
    config = HIERARCHICAL | {"parallel": {"tensor": 2, "pipeline": 2}}
    assert resolved(config, 32, per_node=4).mesh == MeshShape(pipeline=2, data=8, tensor=2, node=4)
    assert resolved(config, 32, per_node=16).mesh.node == 1
    with pytest.raises(ConfigError, match="needs the same number of data ranks on every node"):
        resolved(config, 32, per_node=1)


@pytest.mark.parametrize(
    ("compute", "device", "expected"),
    [("auto", "cpu", "fp32"), ("auto", "cuda", "bf16"), ("fp16", "cpu", "fp16"), ("fp32", "cuda", "fp32")],
)
def test_compute_dtype(compute: str, device: str, expected: str) -> None:
    assert resolved({"precision": {"compute": compute}}, device=device).compute_dtype == expected


@pytest.mark.parametrize(
    ("config", "device", "notices"),
    [
        (
            {"precision": {"compute": "fp16", "nonfinite": "raise"}},
            "cpu",
            ("ignored: precision.nonfinite (the dynamic loss scale of fp16 skips these updates)",),
        ),
        ({"precision": {"compute": "fp16", "nonfinite": "raise", "loss_scale": 8.0}}, "cpu", ()),
        (
            {"precision": {"keep_fp32": ["norm"]}},
            "cpu",
            ("ignored: precision.keep_fp32 (all modules compute in fp32)",),
        ),
        ({"precision": {"keep_fp32": ["norm"]}}, "cuda", ()),
        (
            {"parallel": {"tensor_rules": {"*.up": "column"}}},
            "cpu",
            ("ignored: parallel.tensor_rules (parallel.tensor is 1)",),
        ),
        ({"schedule": {"total_steps": 9}}, "cpu", ("ignored: schedule.total_steps (a constant schedule has no end)",)),
        ({"schedule": {"total_steps": 9}, "optimizer": {"name": "onebit_adam"}}, "cpu", ()),
        (
            {"schedule": {"total_steps": 9}, "communication": {"every": 2}},
            "cpu",
            ("ignored: communication.every (all data ranks are on one node)",),
        ),
        (
            {"schedule": {"min_lr": 1e-5}},
            "cpu",
            ("ignored: schedule.min_lr (a constant schedule stays at optimizer.lr)",),
        ),
        (
            {"schedule": {"min_ratio": 0.1, "decay_steps": 5}},
            "cpu",
            (
                "ignored: schedule.decay_steps (a constant schedule does not decay)",
                "ignored: schedule.min_ratio (a constant schedule stays at optimizer.lr)",
            ),
        ),
        (
            {"schedule": {"warmup": "log", "initial_lr": 0.0}},
            "cpu",
            (
                "ignored: schedule.warmup (there are no warmup_steps)",
                "ignored: schedule.initial_lr (there are no warmup_steps)",
            ),
        ),
        ({"schedule": {"name": "cosine", "total_steps": 9, "min_lr": 1e-5}}, "cpu", ()),
        ({"precision": {"gradients": "fp16"}}, "cpu", ()),
        (
            {"communication": {"within_node": "memory"}},
            "cuda",
            ("ignored: communication.within_node (on cuda the backend chooses the transport)",),
        ),
        ({"communication": {"within_node": "memory"}}, "cpu", ()),
        (
            {"communication": {"through_host": True}},
            "cpu",
            ("ignored: communication.through_host (on cpu, tensors are in host memory already)",),
        ),
        ({"communication": {"through_host": True, "reduction": "ordered"}}, "cuda", ()),
        (
            {"communication": {"reduction": "ordered"}},
            "cpu",
            ("ignored: communication.reduction (on cpu, sums are in rank order in any case)",),
        ),
        ({"communication": {"gradients": "int4"}}, "cpu", ()),
        ({}, "cpu", ()),
    ],
)
def test_what_has_no_effect_is_said(config: dict[str, object], device: str, notices: tuple[str, ...]) -> None:
    assert resolved(config, device=device).notices == notices


def test_description() -> None:
    text = describe(
        resolved(
            {"zero": {"stage": 3, "keep_gathered": True}, "batch": {"micro": 2, "total": 24}, "clip_grad_norm": 1.0}
        )
    )
    assert text.splitlines() == [
        "mesh: 4 ranks = pipeline 1 x data 4 x sequence 1 x tensor 1",
        "zero: stage 3, not resharded after forward",
        "batch: micro 2 x accumulate 3 x data 4 = 24 samples per step",
        "precision: compute fp32 (auto on cpu), master fp32, gradients fp32, moments fp32",
        "optimizer: adamw, learning rate 0.001, constant after 0 steps of warm-up, gradients clipped to norm 1",
    ]


def test_what_is_passed_stands_in_for_its_section() -> None:
    base = resolved({"optimizer": {"lr": 0.5}})
    passed = base.with_passed(("optimizer", "schedule"))
    assert passed.notices == ("ignored: optimizer (one was passed to partita.initialize)",)
    assert describe(passed).splitlines()[4:] == ["optimizer: as passed, scheduler as passed", *passed.notices]
    assert base.with_passed(()) == base


@pytest.mark.parametrize("count", [5, 6, 50])
def test_a_description_is_at_most_10_lines(count: int) -> None:
    many = Resolved(**{**vars(resolved({})), "notices": tuple(f"ignored: a{i}" for i in range(count))})
    lines = describe(many).splitlines()
    assert len(lines) == 10
    assert lines[-1] == ("ignored: a4" if count == 5 else f"... and {count - 4} more settings without effect")
