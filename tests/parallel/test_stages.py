"""Pipeline stages, run one after another in one process, together compute what the model does, bit for bit."""

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partita
from partita import ConfigError, PartitaError
from partita.layout.off_stage import is_off_stage
from partita.layout.parameters import find_all_parameters
from partita.parallel.block_outputs import BlockOutputs
from partita.parallel.pipeline.cut import StageCut, cut, modules_outside_blocks
from partita.parallel.pipeline.early_exit import Arguments, EarlyExit
from partita.parallel.pipeline.off_stage import mark_off_stage, received_value
from partita.parallel.pipeline.placeholder_output import PlaceholderOutput
from partita.parallel.pipeline.stage import Stages, missing_input_error
from partita.sharding.hooks import EarlyOutput
from partita.transforms.modules import ModuleTransforms, Order
from tests.kit.plans import matrix
from tests.kit.ranks import on_ranks
from tests.parallel import stages

CPU = torch.device("cpu")
ROUNDING = 3e-6  # relative to a gradient's largest element: a cut changes the order of sums over branches


def _placeholder(block_outputs: BlockOutputs, module: nn.Module, name: str) -> PlaceholderOutput:
    return PlaceholderOutput(module, name, CPU, lambda _: nullcontext(), block_outputs)


class Stage:
    """One stage of a copy of the model; parameters of other stages have no storage."""

    def __init__(self, model: nn.Module, number: int, num_stages: int) -> None:
        self.model = copy.deepcopy(model)
        self.transforms = ModuleTransforms()
        self.cut: StageCut = cut(self.model, num_stages, None, CPU)
        for info in find_all_parameters(self.model):
            if number not in self.cut.stages[id(info.param)]:
                mark_off_stage(info.param, info.fqns[0], CPU)
                with torch._C.DisableTorchFunctionSubclass():
                    info.param.untyped_storage().resize_(0)
        held = {id(param) for param in self.model.parameters() if not is_off_stage(param)}
        around = dict(modules_outside_blocks(self.model, self.cut.blocks, held))
        changes = self.transforms.at(Order.STAGE)
        block_outputs = BlockOutputs(self.model, self.cut.blocks, (), changes, across_stages=True)
        early_exit = EarlyExit(EarlyOutput())
        placeholder = partial(_placeholder, block_outputs)
        self.stages = Stages(self.model, self.cut.blocks, around, placeholder, early_exit, block_outputs, changes)
        self.start, self.stop = self.cut.block_bounds[number : number + 2]
        self.leaves, self.places = list[Tensor](), list[int]()

    def forward(self, batch: Any, before: Arguments | None) -> Any:
        def receive(arguments: Arguments, lacking: Sequence[int]) -> list[Tensor]:
            assert before is not None
            assert before.form == arguments.form
            self.places = list(lacking)
            values = [received_value(before.leaves[at]).detach().clone() for at in lacking]
            for value, at in zip(values, lacking, strict=True):
                assert (value.shape, value.dtype) == (arguments.leaves[at].shape, arguments.leaves[at].dtype)
            self.leaves = [value.requires_grad_(value.is_floating_point()) for value in values]
            return [value * 1 if value.is_floating_point() else value for value in self.leaves]

        def call() -> Any:
            return self.model(**batch) if isinstance(batch, dict) else self.model(batch)

        return self.stages.forward(self.start, self.stop, call, receive)

    def gradients(self) -> dict[str, Tensor]:
        named = self.model.named_parameters()
        return {name: param.grad for name, param in named if not is_off_stage(param) and param.grad is not None}


@matrix(name=stages.BUILD, num_stages=(2, 3))
def test_stages_compute_what_the_model_does(name: str, num_stages: int) -> None:
    model = stages.build(name)
    whole = [Stage(model, number, num_stages) for number in range(num_stages)]
    assert sum(not is_off_stage(param) for param in whole[0].model.parameters()) < len(list(model.parameters()))
    for number in range(2):  # batches of different lengths
        batch = stages.batch(name, number)
        loss = stages.loss_of(model(**batch) if isinstance(batch, dict) else model(batch))
        model.zero_grad()
        loss.backward()
        outputs = list[Any]()
        for stage in whole:
            stage.model.zero_grad()
            outputs.append(stage.forward(batch, outputs[-1] if outputs else None))
        found = stages.loss_of(outputs[-1])
        if name == "t5":  # attention rounds according to the alignment of the bias, which another stage computes
            torch.testing.assert_close(found, loss, rtol=ROUNDING, atol=0)
        else:
            assert torch.equal(found, loss)
        found.backward()
        for later, sent in zip(reversed(whole[1:]), reversed(outputs[:-1]), strict=True):
            values = [received_value(sent.leaves[at]) for at in later.places]
            pairs = [(v, leaf.grad) for v, leaf in zip(values, later.leaves, strict=True) if leaf.grad is not None]
            torch.autograd.backward([v for v, _ in pairs if v.requires_grad], [g for v, g in pairs if v.requires_grad])
        _compare(name, model, whole)


def _compare(name: str, model: nn.Module, whole: Sequence[Stage]) -> None:
    found = dict[str, Tensor]()
    for stage in whole:
        for key, gradient in stage.gradients().items():
            found[key] = found[key] + gradient if key in found else gradient
    for key, param in model.named_parameters():
        if param.grad is None:
            assert key not in found
        elif name in stages.TIED:
            assert (found[key] - param.grad).abs().max() <= ROUNDING * param.grad.abs().max(), key
        else:
            assert torch.equal(found[key], param.grad), key


def test_registration_order_is_not_call_order() -> None:
    """OPT's last norm, registered before the blocks but called after them, is on the last stage."""
    model = stages.build("opt")
    found = cut(model, 2, None, CPU)
    norm = model.get_parameter("model.decoder.final_layer_norm.weight")
    assert found.stages[id(norm)] == (1,)


def test_stages_have_equal_cost() -> None:
    model = nn.Sequential(*(nn.Linear(8, size) for size in (8, 8, 8)), nn.Linear(8, 24), nn.Linear(24, 8))
    assert cut(model, 2, None, CPU).block_bounds == (0, 3, 5)
    assert cut(model, 3, None, CPU).block_bounds == (0, 3, 4, 5)


def test_cut_at_names() -> None:
    model = stages.build("llama")
    assert cut(model, 2, ["model.layers.3"], CPU).block_bounds == (0, 3, 4)
    assert cut(model, 2, ["lm_head"], CPU).blocks[-1] == "lm_head"


@pytest.mark.parametrize(
    ("num_stages", "names", "message"),
    [
        (5, None, r"5 stages, but LlamaForCausalLM has 4 blocks .*their product to at most 4"),
        (2, ["model.layers.9"], r"parallel.cut: 'model.layers.9' is no module .* model.layers.0, .* model.layers.3"),
        (2, ["model.layers.1.mlp"], "'model.layers.1.mlp' is inside the block .model.layers.1., and a block"),
        (3, ["model.layers.1"], r"names 1 blocks after the first one, which makes 2 stages; .* is 3: name 2"),
    ],
)
def test_cuts_that_cannot_be(num_stages: int, names: list[str] | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cut(stages.build("llama"), num_stages, names, CPU)


def test_a_value_that_bypasses_the_cut() -> None:
    last = Stage(stages.Skipping(skips=True), 1, 2)
    batch = stages.batch("skipping", 0)
    sent = Stage(stages.Skipping(skips=True), 0, 2).forward(batch, None)
    loss = last.forward(batch, sent)
    with pytest.raises(PartitaError, match=r"the loss needs a value that depends on 'embedding.weight', .* stage"):
        raise missing_input_error(loss, "the loss")


class Asking(stages.Skipping):
    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        first = self.embedding(input_ids)
        for block in self.blocks:
            first = block(first, first) if first.sum() > -1e9 else first
        return first.sum()


def test_a_forward_that_asks_for_data_of_another_stage() -> None:
    with pytest.raises(PartitaError, match="needs the data of a tensor that depends on 'embedding.weight'"):
        Stage(Asking(), 1, 2).forward(stages.batch("skipping", 0), None)


class Twice(stages.Skipping):
    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in (*self.blocks, self.blocks[0]):
            x = block(x, x)
        return x.sum()


class LeavesOut(stages.Skipping):
    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in (self.blocks[0], self.blocks[1], self.blocks[3]):
            x = block(x, x)
        return x.sum()


def test_blocks_that_are_called_otherwise_than_expected() -> None:
    batch = stages.batch("skipping", 0)
    with pytest.raises(PartitaError, match="a forward may not leave out 'blocks.2'"):
        Stage(LeavesOut(), 0, 2).forward(batch, None)
    sent = Stage(Twice(), 0, 2).forward(batch, None)
    with pytest.raises(PartitaError, match="'blocks.0' was called behind 'blocks.3', and the pipeline expected it"):
        Stage(Twice(), 1, 2).forward(batch, sent)


def test_outside_a_batch_no_block_can_be_called() -> None:
    stage = Stage(stages.Skipping(), 0, 2)
    with pytest.raises(PartitaError, match=r"outside engine.train_batch and engine.eval_batch"):
        stage.model(**stages.batch("skipping", 0))
    stage.transforms.undo()
    assert stage.model.blocks[0](torch.ones(1, 48), torch.ones(1, 48)).shape == (1, 48)


class _BlocksFirst(torch.nn.Module):
    """Model whose embedding is registered after its blocks, and is therefore on the last stage."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))
        self.embedding = torch.nn.Embedding(4, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def _train_blocks_first() -> None:
    with partita.initialize(_BlocksFirst(), {"parallel": {"pipeline": 2}}) as engine:
        engine.train_batch([torch.zeros(2, 3, dtype=torch.long)])


def test_an_embedding_registered_after_the_blocks_is_named() -> None:
    """The first stage raises an error, and does not wait for an input that no stage sends."""
    with pytest.raises(partita.PartitaError, match="the input of 'blocks.0', the first block, depends on parameters"):
        on_ranks(2, _train_blocks_first)
