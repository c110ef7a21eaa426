"""Updates: close to float64, and the same bits from every implementation."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from partita.kernels import native, reference, update
from partita.kernels.quantize import SIGNED_RANGE, UNSIGNED_RANGE, decode_signed, decode_unsigned
from partita.kernels.state import AdamRule, LionRule, Moments, SgdRule, Weights
from tests.kernels.states import (
    ADAM,
    FORMS,
    GRADS,
    RULES,
    SIZES,
    Rule,
    State,
    assert_same_bits,
    make,
    moments_of,
    random_grad,
    same_bits,
    step,
    weights_of,
)

FACTOR = 0.37
CODED = (ADAM, replace(ADAM, decoupled=False))
ALL_RULES = [(rule, False) for rule in RULES] + [(rule, True) for rule in CODED]


@pytest.fixture(params=["compiled", "uncompiled"])
def either(request: pytest.FixtureRequest) -> None:
    """Run the test with the compiled kernels, and without."""
    request.getfixturevalue(request.param)


def in_float64(start: Tensor, grads: list[Tensor], rule: Rule) -> Tensor:
    """Return the weights after updates in float64 by torch's optimizer, or for Lion by the paper's formula."""
    p = start.double().requires_grad_()
    match rule:
        case AdamRule():
            kind = torch.optim.AdamW if rule.decoupled else torch.optim.Adam
            betas = rule.beta1, rule.beta2
            optimizer = kind([p], rule.lr, betas=betas, eps=rule.eps, weight_decay=rule.weight_decay, foreach=False)
        case SgdRule():
            optimizer = torch.optim.SGD([p], rule.lr, rule.momentum, 0, rule.weight_decay)
        case LionRule():
            return lion_in_float64(p.detach(), grads, rule)
    for grad in grads:
        p.grad = grad.double() * FACTOR
        optimizer.step()
    return p.detach()


def lion_in_float64(p: Tensor, grads: list[Tensor], rule: LionRule) -> Tensor:
    m = torch.zeros_like(p)
    for grad in grads:
        g = grad.double() * FACTOR
        p = p - rule.lr * ((rule.beta1 * m + (1 - rule.beta1) * g).sign() + rule.weight_decay * p)
        m = rule.beta2 * m + (1 - rule.beta2) * g
    return p


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", GRADS)
def test_steps_are_those_of_float64(rule: Rule, form: str, dtype: torch.dtype) -> None:
    num = 1000
    start = torch.randn(num)
    state = State(weights_of(start.clone(), form), Moments(torch.zeros(num), torch.zeros(num)))
    # Gradients far from zero: Lion takes the sign of a sum, which rounding could change.
    grads = [(torch.randn(num).sign() * (0.1 + torch.rand(num))).to(dtype) for _ in range(3)]
    for number, grad in enumerate(grads, start=1):
        assert step(state, grad, replace(rule, step=number) if isinstance(rule, AdamRule) else rule, FACTOR)
    expected = in_float64(start, grads, rule)
    tolerance = 3e-7 * start.abs().max() + 1e-5 * rule.lr
    if isinstance(rule, LionRule):  # one sum may be that close to zero
        assert ((state.master - expected).abs() > tolerance).sum() <= 1
    else:
        assert (state.master - expected).abs().max() <= tolerance
    if state.weights.param is not None:
        half = state.weights.param
        assert (half - expected).abs().max() <= torch.finfo(half.dtype).eps * expected.abs().max() / 2 + 1e-5


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(("rule", "coded"), ALL_RULES)
@pytest.mark.parametrize("form", FORMS)
def test_every_way_gives_the_same_bits(rule: Rule, coded: bool, form: str) -> None:
    """The reference, each instruction set and any number of threads have the same bits, at every size."""
    for num in SIZES:
        same_from_every_way(num, rule, coded, form)


def same_from_every_way(num: int, rule: Rule, coded: bool, form: str) -> None:
    """Check that three steps, with gradients of each dtype in turn, have the bits of the reference."""
    start = make(num, form, coded=coded)
    grads = [random_grad(num, dtype) for dtype in GRADS]
    expected = start.clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "module", lambda: None)
        for grad in grads:
            step(expected, grad, rule, FACTOR)
    for level, threads in itertools.product(native.levels(), (1, 2, 3)):
        state = start.clone()
        for grad in grads:
            step(state, grad, rule, FACTOR, threads, level)
        assert_same_bits(state, expected)


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize(("rule", "coded"), ALL_RULES)
@pytest.mark.parametrize("form", FORMS)
def test_cuts_at_blocks_change_nothing(rule: Rule, coded: bool, form: str) -> None:
    num = 256 * 7 + 100
    whole = make(num, form, coded=coded)
    parts, grad = whole.clone(), random_grad(num, torch.bfloat16)
    step(whole, grad, rule, FACTOR)
    for start, stop in ((0, 256), (256, 1280), (1280, num)):
        step(parts.cut(start, stop), grad[start:stop].clone(), rule, FACTOR)
    assert_same_bits(whole, parts)


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("coded", [False, True])
def test_split_is_the_master_with_its_parameter(coded: bool) -> None:
    num = 5000
    whole = make(num, "fp32 and bf16", coded=coded)
    halves = State(weights_of(whole.master.clone(), "split"), whole.clone().moments)
    for number in range(1, 20):
        grad, rule = random_grad(num, torch.bfloat16), replace(ADAM, step=number)
        step(whole, grad, rule)
        step(halves, grad, rule)
    assert same_bits(whole.master, halves.master)
    assert same_bits(whole.weights.param, halves.weights.param)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("form", ["fp32 and bf16", "fp32 and fp16"])
@pytest.mark.parametrize("offset", [0, 3])
def test_large_buffers_are_written_past_the_caches(form: str, offset: int) -> None:
    num = (1 << 20) + 1000
    state = make(num + offset, form).map(lambda tensor, _: tensor[offset:])
    assert state.weights.param is not None
    step(state, random_grad(num, torch.float16), ADAM, threads=2)
    half = reference.nearest_bf16(state.master) if form.endswith("bf16") else state.master.half()
    assert same_bits(state.weights.param, half)


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_is_reported(rule: Rule, bad: float) -> None:
    for at, dtype in itertools.product((0, 255, 700, 999), GRADS):
        state, grad = make(1000, "fp32"), random_grad(1000, dtype)
        assert step(state.clone(), grad, rule, threads=2)
        grad[at] = bad
        assert not step(state, grad, rule, threads=2)
        others = torch.arange(1000) != at
        assert state.master[others].isfinite().all()
        if not isinstance(rule, LionRule) or math.isnan(bad):
            assert not state.master[at].isfinite()


@pytest.mark.usefixtures("either")
def test_what_overflows_by_its_factor_is_reported() -> None:
    assert not step(make(300, "fp32"), torch.full((300,), 1e30), ADAM, factor=1e30)


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("coded", [False, True])
def test_nothing_becomes_of_zeros(coded: bool) -> None:
    zeros = torch.zeros(600)
    moments = moments_of(zeros.clone(), zeros.clone(), coded=coded)
    state = State(weights_of(zeros.clone(), "split"), moments).map(lambda tensor, _: tensor.zero_())
    assert step(state, zeros, ADAM)
    assert all(not tensor.any() for name, tensor in state.tensors.items() if "scale" not in name)


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("rule", [ADAM, SgdRule(lr=1e-2, momentum=0.9), LionRule(lr=1e-3)])
def test_moments_decay_to_zero(rule: Rule) -> None:
    """Moments decay to zero, not to denormal numbers, where rounding would stop them and processors are slow."""
    state = make(300, "fp32")
    state.moments.exp_avg.fill_(1.3e-38)
    state.moments.exp_avg_sq.fill_(1.19e-38)
    for _ in range(20):
        step(state, torch.zeros(300), rule)
    assert not state.moments.exp_avg.any()
    if isinstance(rule, AdamRule):
        assert not state.moments.exp_avg_sq.any()


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("tiny", [1e-20, 1e-30, 1e-42])
@pytest.mark.parametrize("coded", [False, True])
def test_tiny_gradients_do_no_harm(tiny: float, coded: bool) -> None:
    state = State(weights_of(torch.ones(600), "fp32"), moments_of(torch.zeros(600), torch.zeros(600), coded=coded))
    for number in range(1, 5):
        assert step(state, torch.full((600,), tiny), replace(ADAM, step=number))
    assert ((state.master <= 1) & (state.master > 0.99)).all()


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("form", FORMS)
def test_a_step_with_coded_moments(form: str) -> None:
    """Weights are updated by the decoded moments, and new moments are within the error bounds of the exact ones."""
    num = 2000
    state, grad = make(num, form, coded=True), random_grad(num, torch.float32)
    before = state.clone()
    m, v = (values.double() for values in decoded(before.moments))
    assert step(state, grad, ADAM, FACTOR)
    g = grad.double() * FACTOR
    m, v = m * 0.9 + 0.1 * g, v * 0.99 + 0.01 * g.square()
    denominator = (v / (1 - 0.99**3)).sqrt() + 1e-8
    expected = before.master.double() * (1 - 1e-4) - 1e-3 / (1 - 0.9**3) * m / denominator
    assert (state.master - expected).abs().max() < 1e-6
    new_m, new_v = decoded(state.moments)
    for new, exact, reach in ((new_m, m, SIGNED_RANGE), (new_v, v, UNSIGNED_RANGE)):
        blocks = torch.nn.functional.pad(exact.abs(), (0, -num % 256)).view(-1, 256)
        scale = blocks.amax(1).repeat_interleave(256)[:num]
        assert ((new - exact).abs() < (exact.abs() + scale / reach) / 16 * 1.0001).all()
    assert ((new_v > 0) == (v > 0)).all()


def decoded(moments: Moments) -> tuple[Tensor, Tensor]:
    assert moments.exp_avg_scale is not None
    assert moments.exp_avg_sq_scale is not None
    first = decode_signed(moments.exp_avg, moments.exp_avg_scale)
    return first, decode_unsigned(moments.exp_avg_sq, moments.exp_avg_sq_scale)


@pytest.mark.usefixtures("either")
def test_coded_moments_decay_on_average() -> None:
    """Coded moments decay on average; rounded to nearest they never would: a decay is far smaller than a code step."""
    num, steps = 256 * 20, 150
    exact_m, exact_v = torch.rand(num) + 0.1, torch.rand(num) + 0.1
    moments = moments_of(exact_m, exact_v, coded=True)
    state = State(Weights(master=torch.zeros(num)), moments)
    rule = AdamRule(lr=0.0, step=1, beta1=0.999, beta2=0.999)
    for number in range(1, steps + 1):
        step(state, torch.zeros(num), replace(rule, step=number))
    m, v = decoded(state.moments)
    assert m.sum() / exact_m.sum() == pytest.approx(0.999**steps, rel=0.02)
    assert v.sum() / exact_v.sum() == pytest.approx(0.999**steps, rel=0.02)


@pytest.mark.usefixtures("compiled")
def test_threads_and_instruction_sets_that_are_not_there() -> None:
    state, grad = make(10, "fp32"), random_grad(10, torch.float32)
    with pytest.raises(RuntimeError, match="threads must be at least 1, got 0"):
        step(state, grad, ADAM, threads=0)
    with pytest.raises(RuntimeError, match="instruction sets are baseline.*; got 'mmx'"):
        step(state, grad, ADAM, level="mmx")


def test_sgd_takes_its_buffer_with_its_momentum() -> None:
    state, grad = make(10, "fp32"), random_grad(10, torch.float32)
    with pytest.raises(RuntimeError, match="momentum 0.9 needs a momentum_buffer, got none"):
        update.sgd_(state.weights, None, grad, SgdRule(lr=1e-2, momentum=0.9))
    with pytest.raises(RuntimeError, match="momentum 0 needs no momentum_buffer, got one"):
        update.sgd_(state.weights, state.moments.exp_avg, grad, SgdRule(lr=1e-2))
