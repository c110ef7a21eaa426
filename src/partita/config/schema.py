"""The configuration: one frozen section per component, every key with its default, unknown keys refused.

Each section checks its own values here; rules that depend on several sections, on the number of ranks or on the device
are checked in :mod:`partita.config.resolve`.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PlainSerializer, ValidationError, create_model

from partita.config.messages import Where, report, validation_problems
from partita.config.plain_values import plain
from partita.config.values import (
    Auto,
    Bytes,
    ClassPlace,
    Count,
    CountOrZero,
    Flag,
    NotNegative,
    PathText,
    Positive,
    Ratio,
    Rows,
    Section,
    Share,
    SharePair,
    SomeTexts,
    Text,
    Texts,
    Windows,
    as_pairs,
    as_whole,
)

Stage = Annotated[Literal[0, 1, 2, 3], BeforeValidator(as_whole)]
Tier = Literal["none", "host", "disk", "auto"]
TensorRule = Literal["column", "row", "column_gathered", "row_split", "vocabulary", "whole"]
TensorRules = Annotated[
    tuple[tuple[Text, TensorRule], ...],
    BeforeValidator(as_pairs, json_schema_input_type=dict[Text, TensorRule]),
    PlainSerializer(dict, return_type=dict[Text, TensorRule]),
]
Gradients = Literal["fp32", "bf16", "fp16", "in_backward"]
Compute = Literal["auto", "fp32", "bf16", "fp16"]
GradientCodec = Literal["full", "int8", "int4", "2bit", "ternary", "onebit", "topk", "low_rank"] | ClassPlace
ParameterCodec = Literal["full", "int8", "int4", "2bit", "ternary", "onebit", "topk"]


class Parallel(Section):
    """Number of ranks along each mesh axis; their product is the number of ranks."""

    data: Auto | Count = Field("auto", description="data-parallel ranks; auto: all ranks that the other axes leave")
    tensor: Count = Field(1, description="ranks that share each layer's matrices")
    pipeline: Count = Field(1, description="ranks that hold successive groups of layers")
    sequence: Count = Field(1, description="ranks that share each sample's sequence")
    schedule: Literal["1f1b", "gpipe", "interleaved", "zero_bubble"] = Field(
        "1f1b", description="order of the micro-batches' forwards and backwards on the pipeline's ranks"
    )
    chunks: Count = Field(1, description="groups of layers that each pipeline rank holds (interleaved: at least 2)")
    cut: Auto | SomeTexts = Field(
        "auto", description="names of the blocks that begin the pipeline's groups of layers; auto: equal cost"
    )
    tensor_rules: TensorRules = Field(
        (), description="how modules are split over the tensor ranks, by class name or name pattern; before all else"
    )


class Offload(Section):
    """Memory tier of each state: the device, the host's memory, or the disk."""

    parameters: Tier = Field("none", description="tier of the parameters; auto: as much as fits")
    optimizer: Tier = Field("none", description="tier of master weights and moments; auto: as much as fits")
    gradients: Tier = Field("auto", description="tier of the gradients; auto: where the optimizer states are")
    path: PathText | None = Field(None, description="folder of the disk tier; null: the system's temporary one")


class Zero(Section):
    """Sharding of the training states over the data-parallel ranks."""

    stage: Stage = Field(
        1, description="what is sharded: 0 nothing, 1 optimizer states, 2 gradients too, 3 parameters too"
    )
    offload: Offload = Field(Offload(), description="where each state rests")
    units: Auto | SomeTexts = Field(
        "auto", description="class names or name patterns of the modules gathered whole; auto: the repeated blocks"
    )
    prefetch_bytes: Auto | Bytes = Field(
        "auto", description="stage 3: bytes of parameters gathered ahead of use (0: none)"
    )
    keep_gathered: Flag = Field(False, description="stage 3: keep parameters whole between forward and backward")
    keep_gradients: Flag = Field(
        False,
        description="with keep_gathered: keep gradients whole between micro-batches, and reduce them once a batch",
    )
    hierarchical: Flag = Field(
        False,
        description="stage 3: backward gathers inside the node, from a second shard; with codes of "
        "communication.parameters forward does, too, and what was updated passes between nodes as changes",
    )
    replicate: Literal["none", "nodes"] = Field(
        "none", description="stage 3: nodes splits all states over the ranks of a node alone, so every node has them"
    )


class Precision(Section):
    """The dtype of each state."""

    compute: Compute = Field(
        "auto", description="dtype of forward and backward; auto: bf16 on an accelerator, fp32 on CPU"
    )
    mode: Literal["mixed", "autocast", "cast"] = Field(
        "mixed",
        description="how 16-bit compute is done; mixed: 16-bit parameters, forward under torch.autocast; autocast: the "
        "same with fp32 parameters; cast: parameters, buffers and arguments are cast, without autocast",
    )
    outputs: Literal["fp32", "compute"] = Field(
        "fp32", description="dtype of the model's outputs under 16-bit compute; compute: as the model returns them"
    )
    master: Literal["fp32", "split"] = Field("fp32", description="weights that the optimizer updates")
    frozen: Literal["fp32", "compute"] = Field(
        "fp32",
        description="frozen fp32 parameters under 16-bit compute; fp32: their fp32 values are kept beside, as master "
        "weights are; compute: they are rounded for good, which saves the memory",
    )
    gradients: Gradients = Field(
        "fp32",
        description="dtype in which gradients rest and travel; in_backward: fp32, and none rests, as each unit is "
        "updated in backward",
    )
    moments: Literal["fp32", "int8"] = Field("fp32", description="the optimizer's running averages")
    loss_scale: Literal["dynamic"] | Positive = Field(
        "dynamic", description="factor on the loss under fp16 compute; dynamic: as large as stays finite"
    )
    initial_loss_scale: Positive = Field(2.0**16, description="dynamic loss scale: the factor of the first step")
    loss_scale_window: Count = Field(
        2000, description="dynamic loss scale: steps without an overflow after which the factor doubles"
    )
    nonfinite: Literal["skip", "raise", "rewind"] = Field(
        "skip",
        description="where loss or gradients are not finite: leave the update out, end in an error, or go back to the "
        "newest checkpoint",
    )
    keep_fp32: Texts = Field((), description="module class names or name patterns of modules that compute in fp32")


class Batch(Section):
    """Samples: total = micro x accumulate x data ranks. A missing value follows from the others, else it is 1."""

    micro: Auto | Count = Field("auto", description="samples per rank in one forward")
    accumulate: Auto | Count = Field("auto", description="micro-batches between two optimizer steps")
    total: Auto | Count = Field("auto", description="samples of one optimizer step, over all ranks")


class Optimizer(Section):
    """The optimizer that is built if ``initialize`` is given none."""

    name: Literal["adamw", "adam", "sgd", "lion", "onebit_adam"] = Field(
        "adamw",
        description="adamw, adam, sgd, lion; onebit_adam: Adam whose second moment is frozen after a warm-up "
        "(communication.warmup_steps)",
    )
    lr: NotNegative = Field(1.0e-3, description="learning rate (the highest of the schedule)")
    betas: SharePair = Field((0.9, 0.999), description="decay of the two running averages (not of sgd's one)")
    eps: Positive = Field(1.0e-8, description="added to the divisor (not of sgd and lion)")
    weight_decay: NotNegative = Field(0.01, description="decay of the weights: decoupled in adamw, L2 elsewhere")
    momentum: Share = Field(0.0, description="decay of the running average (sgd only)")
    sends: Literal["averages", "gradients"] = Field(
        "averages",
        description="onebit_adam: what ranks send after the warm-up: running averages of gradients, as codes, or "
        "gradients (of communication.gradients)",
    )


class Schedule(Section):
    """The learning rate over optimizer steps: a warm-up to the highest, then the named curve."""

    name: Literal["constant", "linear", "cosine"] = Field("constant", description="the curve after the warm-up")
    warmup_steps: CountOrZero = Field(0, description="optimizer steps of warm-up")
    warmup: Literal["linear", "log"] = Field("linear", description="how the rate rises in the warm-up")
    max_lr: Positive | None = Field(
        None, description="highest learning rate, of all parameter groups; null: each group's own (optimizer.lr)"
    )
    initial_lr: NotNegative | None = Field(
        None, description="learning rate of the first step of the warm-up; null: it is a step above 0 already"
    )
    initial_steps: CountOrZero = Field(0, description="optimizer steps at initial_lr, before the warm-up")
    total_steps: Count | None = Field(None, description="optimizer steps, warm-up included, until min_lr is reached")
    decay_steps: Count | None = Field(
        None, description="how many of total_steps, the last ones, the curve takes; null: all after the warm-up"
    )
    min_lr: NotNegative = Field(0.0, description="learning rate at and after total_steps")
    min_ratio: Ratio = Field(0.0, description="the same, as a share of each parameter group's highest learning rate")


class Activations(Section):
    """Activations that forward keeps for backward, and their memory tier."""

    checkpoint: Literal["none", "units", "selective"] | SomeTexts = Field(
        "none",
        description="what runs forward again in backward: units; selective: units, but for matrix products, "
        "convolutions and attention, whose results are kept; or modules, by class name or name pattern",
    )
    partition: Flag = Field(
        False,
        description="split the inputs that recomputed modules keep over the tensor ranks, which have them alike, and "
        "gather them ahead of backward",
    )
    offload: Literal["none", "host", "disk"] = Field(
        "none", description="tier in which the inputs of recomputed modules rest between forward and backward"
    )
    keep_bytes: Literal["none", "auto"] | Bytes = Field(
        "none",
        description="bytes for which modules at the end of forward are kept whole in place of being recomputed; auto: "
        "what the first step left free",
    )


class AttentionSection(Section):
    """Block-sparse attention: the keys that each query attends to."""

    pattern: Literal["dense", "sliding", "fixed", "variable", "bigbird", "longformer", "user"] = Field(
        "dense", description="which keys each query sees; dense: attention stays the model's own"
    )
    block: Count = Field(64, description="positions in a block, the unit in which attention is computed or left out")
    window: Windows | None = Field(
        None,
        description="positions, as in transformers' sliding_window; fixed: positions of each window; variable: a list, "
        "whose last goes for all that follow",
    )
    random: CountOrZero = Field(0, description="random blocks that each block of queries sees (bigbird, variable)")
    causal: Auto | Flag = Field("auto", description="nobody sees what comes later; auto: as each module has it")
    layers: Auto | SomeTexts = Field(
        "auto", description="class names or name patterns of the modules that have it; auto: all self-attention"
    )
    layout: Rows = Field(
        (), description="user: a row of 0 and 1 for each block of queries, with a figure for each block of keys"
    )
    packed: Flag = Field(
        False, description="dense: compute no more than what documents packed into a sample (position_ids) see"
    )


_GLOBAL = Field(0, description="blocks that all see: the first ones; fixed: the last ones of each window")
_KEYWORD: dict[str, Any] = {"global": (CountOrZero, _GLOBAL)}  # no class body can have it as a name
Attention = create_model(
    "Attention", __base__=AttentionSection, __module__=__name__, __doc__=AttentionSection.__doc__, **_KEYWORD
)


class Loss(Section):
    """Computation of the loss from the last hidden states."""

    tiled: Literal["none", "auto"] | Bytes = Field(
        "none",
        description="compute logits and their cross-entropy in tiles, so that they are never whole: bytes of the "
        "logits of a tile; auto: a number of rows that fits the layer",
    )
    head: Auto | SomeTexts = Field(
        "auto",
        description="class names or name patterns of the linear layers that make logits; auto: the model's output "
        "embeddings, or the last widening layer outside the blocks",
    )


class Tiled(Section):
    """Modules that are computed tile by tile."""

    mlp: Texts = Field(
        (),
        description="class names or name patterns of modules that compute every position by itself: they run on some "
        "positions at a time, and again in backward",
    )


class Communication(Section):
    """Communication between ranks: encodings, intervals and limits."""

    gradients: GradientCodec = Field(
        "full",
        description="encoding of gradients as they travel; full: precision.gradients; int8, int4: codes in blocks, "
        "rounded at random, and summed in fp32; 2bit, ternary, onebit, topk: coarser ones, to nearest, and low_rank: "
        "matrices as two thin factors (PowerSGD), whose error is held back and sent later; sums that go back do so as "
        "int8, or held back, too; module:class: a partita.kernels.codecs.TorchCodec of your own, whose error is held "
        "back",
    )
    low_rank: Count = Field(4, description="columns of each factor of gradients: low_rank")
    parameters: ParameterCodec = Field(
        "full",
        description="encoding of parameters as they travel; full: precision.compute. Stage 3: as they are gathered, "
        "int8. Stages 1 and 2, and between the nodes of zero.hierarchical: of their changes, int8, int4, 2bit, "
        "ternary, onebit or topk, whose error is in the next",
    )
    warmup_steps: Auto | CountOrZero = Field(
        "auto",
        description="optimizer steps before codes travel; auto: none, of onebit_adam 15 % of schedule.total_steps",
    )
    warmup: Literal["full", "int8"] = Field(
        "full",
        description="encoding, in the steps before codes travel, of what travels as codes later: full, or int8",
    )
    every: Count | None = Field(
        None,
        description="replicas train apart, and exchange how far they have come every so many optimizer steps (DiLoCo); "
        "gradients is then the encoding of that; null: they exchange every gradient",
    )
    replicas: Auto | Count = Field("auto", description="every: groups of data ranks that train apart; auto: the nodes")
    outer_lr: Positive = Field(0.7, description="every: learning rate of the outer optimizer, which the replicas share")
    outer_momentum: Share = Field(0.9, description="every: decay of the outer optimizer's running average")
    outer_nesterov: Flag = Field(True, description="every: the outer optimizer looks ahead along its running average")
    check_every: Auto | CountOrZero = Field(
        "auto",
        description="optimizer steps between two checks that ranks which hold the same parameters have the same bits; "
        "0: none; auto: 100 where changes of parameters travel as codes, else none",
    )
    buffers: Literal["broadcast", "local"] = Field(
        "broadcast", description="buffers that change (BatchNorm) follow rank 0, or stay each rank's own"
    )
    within_node: Literal["auto", "memory", "network"] = Field(
        "auto", description="CPU: ranks of a node read each other's memory (auto: where the system lets them)"
    )
    timeout_s: Positive = Field(600.0, description="seconds that a collective may take before it is an error")


class Checkpoint(Section):
    """Saving while training."""

    dir: PathText | None = Field(None, description="folder of the checkpoints; null: none are saved")
    every_steps: Count | None = Field(None, description="optimizer steps between two checkpoints")
    keep: Count = Field(3, description="how many of the newest checkpoints stay")
    background: Flag = Field(True, description="write while training goes on")


class Config(Section):
    """The full configuration of an engine.

    Raises:
        ConfigError: a key is unknown or a value is wrong; the message lists all of them.
    """

    parallel: Parallel = Field(Parallel(), description="ranks along each mesh axis")
    zero: Zero = Field(Zero(), description="how states are split and where they rest")
    precision: Precision = Field(Precision(), description="the dtype of each state")
    batch: Batch = Field(Batch(), description="samples of a step")
    optimizer: Optimizer = Field(Optimizer(), description="the optimizer")
    schedule: Schedule = Field(Schedule(), description="the learning rate over steps")
    clip_grad_norm: Positive | None = Field(None, description="largest global norm of the gradients; null: not clipped")
    activations: Activations = Field(Activations(), description="what is kept for backward")
    attention: Attention = Field(Attention(), description="which keys each query sees")
    loss: Loss = Field(Loss(), description="how the loss is computed")
    tiled: Tiled = Field(Tiled(), description="modules that are computed tile by tile")
    communication: Communication = Field(Communication(), description="what travels between ranks")
    checkpoint: Checkpoint = Field(Checkpoint(), description="saving while training")
    seed: CountOrZero | None = Field(
        None, description="of dropout and other random numbers, alike for all ways to split a model; null: drawn"
    )

    def __init__(self, /, **sections: Any) -> None:
        self._fill(sections, lambda path: "")

    @classmethod
    def located(cls, sections: Mapping[str, object], where: Where) -> Self:
        """Return the configuration with these sections; in errors, ``where(path)`` says where a key comes from."""
        config = cls.__new__(cls)
        config._fill(sections, where)
        return config

    def _fill(self, sections: Mapping[str, object], where: Where) -> None:
        data = plain(sections, "the configuration")
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise report(validation_problems(error, type(self), data), where) from None
