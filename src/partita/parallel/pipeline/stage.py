"""A stage: the model's own forward, in which only some blocks are run.

The forward runs from the beginning, without data for values that depend on parameters of earlier stages. At the stage's
first block the missing values arrive. The forward ends when it calls the first block of the next stage. The code
between two blocks belongs to the stage of the earlier one, and the code before all blocks to the first stage.

Outputs of single blocks that the model collects (router logits, hidden states) are passed on from stage to stage with
the arguments of each stage's first block.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_unflatten

from partita.errors import PartitaError
from partita.parallel.block_outputs import BlockOutputs
from partita.parallel.pipeline.early_exit import Arguments, EarlyExit
from partita.parallel.pipeline.off_stage import DataNeededError, OffStageTensor, is_missing, received_value
from partita.sharding.hooks import call_within_hooks
from partita.transforms.modules import Level

# Returns the placeholder output of a module that is not run here, for its args and kwargs.
MakePlaceholder = Callable[[tuple[Any, ...], Mapping[str, Any]], Any]
# Receives what a block lacks: called with its arguments, and the indices of the missing leaves.
Receive = Callable[[Arguments, Sequence[int]], Sequence[Tensor]]


@dataclass
class StageForward:
    """One forward, for the stage of the blocks ``[start, stop)``.

    Attributes:
        receive: called to receive the arguments that the first block lacks.
        position: the index after that of the last block that was called or passed by.
    """

    start: int
    stop: int
    receive: Receive
    position: int = 0

    @property
    def outside_is_own(self) -> bool:
        """True if the code that now runs outside blocks belongs to this stage."""
        return self.position > self.start or self.start == 0


class Stages:
    """A model whose blocks are run by stages.

    Args:
        blocks: the names of the blocks, in the order of the forward.
        outside: other modules with parameters that this rank holds, by name.
        placeholder: returns, for a module and its name, the function that makes its placeholder output.
        early_exit: ends forwards that continue on the next stage.
        block_outputs: outputs of single blocks, which stages pass on.
        changes: wraps the modules' calls.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[str],
        outside: Mapping[str, nn.Module],
        placeholder: Callable[[nn.Module, str], MakePlaceholder],
        early_exit: EarlyExit,
        block_outputs: BlockOutputs,
        changes: Level,
    ) -> None:
        self.blocks = blocks
        self.early_exit = early_exit
        self.block_outputs = block_outputs
        self.stage_forward: StageForward | None = None
        modules = dict(model.named_modules())
        stands: list[tuple[nn.Module, str, int | None]]
        stands = [(modules[name], name, index) for index, name in enumerate(blocks)]
        stands += [(module, name, None) for name, module in outside.items()]
        for module, name, index in stands:
            changes.wrap_call(module, _Call(index, self, module, placeholder(module, name), name))

    def forward(self, start: int, stop: int, call: Callable[[], Any], receive: Receive) -> Any:
        """Run ``call``, a forward of the model, for the stage of the blocks ``[start, stop)``.

        Returns:
            The result of ``call``, or the :class:`Arguments` of the block ``stop``, if there is one.

        Raises:
            PartitaError: the forward calls its blocks in another order than expected.
        """
        self.stage_forward = StageForward(start, stop, receive)
        try:
            output = self.early_exit.run(call)
        finally:
            self.stage_forward = None
            self.block_outputs.clear()
        if stop < len(self.blocks) and not isinstance(output, Arguments):
            raise PartitaError(
                f"the forward ended without a call of '{self.blocks[stop]}', with which the next stage of the pipeline "
                "begins; name blocks in parallel.cut that every forward calls"
            )
        return output


class _Call:
    """Wrapper of a module's call, outside the module's hooks. ``index``: the block's, or None for other modules."""

    def __init__(
        self, index: int | None, stages: Stages, module: nn.Module, placeholder: MakePlaceholder, name: str
    ) -> None:
        self._index = index
        self._stages = stages
        self._module = module
        self._placeholder = placeholder
        self._name = name

    def __call__(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        stage_forward, index = self._stages.stage_forward, self._index
        if stage_forward is None:
            raise PartitaError(
                f"'{self._name}' was called outside engine.train_batch and engine.eval_batch: under parallel.pipeline "
                "no rank has the whole model: call these, or call the model inside engine.gathered()"
            )
        if index is None:
            return own(*args, **kwargs) if stage_forward.outside_is_own else self._pass(args, kwargs)
        if index < stage_forward.position or stage_forward.position <= stage_forward.stop < index:
            raise self._out_of_order(stage_forward.position, index)
        stage_forward.position = index + 1
        block_outputs = self._stages.block_outputs
        if index == 0:
            block_outputs.add_hidden_states((args, kwargs))
        if index < stage_forward.start:
            output = self._pass(args, kwargs)
            block_outputs.add_hidden_states(output)
            return output
        is_at_cut = index in (stage_forward.start, stage_forward.stop)
        arguments = Arguments.of(args, kwargs, block_outputs.passed_on if is_at_cut else ())
        if index == stage_forward.stop:
            self._stages.early_exit.leave(arguments)
        output = self._call(own, stage_forward, arguments)
        block_outputs.add_hidden_states(output)
        return output

    def _pass(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the placeholder output of a module that another stage runs.

        Hooks may store the output or change its form. A hook that reads values has no effect here; it runs on the other
        stage.
        """
        return call_within_hooks(self._module, self._placeholder, args, kwargs, ignored=DataNeededError)

    def _call(self, own: Callable[..., Any], stage_forward: StageForward, arguments: Arguments) -> Any:
        """Run a block of this stage, with the arguments that arrive for it.

        Raises:
            PartitaError: an argument depends on another stage, and does not arrive.
        """
        leaves = arguments.leaves
        if self._index == stage_forward.start:
            lacking = [at for at, leaf in enumerate(leaves) if is_missing(leaf)]
            if lacking and stage_forward.start == 0:  # no stage would send it
                raise PartitaError(
                    f"parallel.pipeline: the input of '{self._name}', the first block, depends on parameters that the "
                    "first stage does not hold: a module that the forward calls before its blocks is registered after "
                    "them; register it before them, in the order of the calls"
                )
            if lacking:
                for at, value in zip(lacking, stage_forward.receive(arguments, lacking), strict=True):
                    leaves[at].value = value
        args, kwargs, _ = tree_unflatten([received_value(leaf) for leaf in leaves], arguments.spec)
        for leaf in leaves:
            if is_missing(leaf):
                raise missing_input_error(leaf, f"'{self._name}'")
        return own(*args, **kwargs)

    def _out_of_order(self, position: int, index: int) -> PartitaError:
        blocks = self._stages.blocks
        if index < position:
            text = f"'{self._name}' was called behind '{blocks[position - 1]}'"
            return PartitaError(
                f"{text}, and the pipeline expected it before, once in a forward: a block that is called several "
                "times, or in another order than that of the model's modules, cannot be cut off; name blocks in "
                "parallel.cut that contain those"
            )
        return PartitaError(
            f"'{self._name}' was called without '{blocks[index - 1]}' before: a forward may not leave out "
            f"'{self._stages.blocks[position]}'"
        )


def missing_input_error(value: OffStageTensor, reader: str) -> PartitaError:
    """Return the error about a value of another stage that ``reader`` needs and that is not sent."""
    return PartitaError(
        f"{reader} needs a value that depends on '{value.origin}', which is on an earlier stage of the pipeline, and "
        "it does not pass the cut: only the arguments of a stage's first block are sent; hand it to the blocks, cut so "
        "that both are on one stage (parallel.cut), or leave parallel.pipeline out"
    )
