"""The configuration: one frozen section per component, each key with its default and description.

Each section checks its own values here. :mod:`partita.config.resolve` checks rules that depend on several sections, on
the number of ranks or on the device.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PlainSerializer, Strict, ValidationError, create_model

from partita.config.messages import Where, report, validation_problems
from partita.config.plain_values import plain
from partita.config.values import (
    Auto,
    Bytes,
    ClassPath,
    Coefficients,
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
    as_integer,
    as_pairs,
    as_tuple,
)

Stage = Annotated[Literal[0, 1, 2, 3], BeforeValidator(as_integer)]
Tier = Literal["none", "host", "disk", "auto"]
TensorRule = Literal["column", "row", "column_gathered", "row_split", "vocabulary", "whole"]
TensorRules = Annotated[
    tuple[tuple[Text, TensorRule], ...],
    BeforeValidator(as_pairs, json_schema_input_type=dict[Text, TensorRule]),
    PlainSerializer(dict, return_type=dict[Text, TensorRule]),
]
MatrixRule = Literal["muon", "adamw"] | Count
MatrixRules = Annotated[
    tuple[tuple[Text, MatrixRule], ...],
    BeforeValidator(as_pairs, json_schema_input_type=dict[Text, MatrixRule]),
    PlainSerializer(dict, return_type=dict[Text, MatrixRule]),
]
Gradients = Literal["fp32", "bf16", "fp16", "in_backward"]
Compute = Literal["auto", "fp32", "bf16", "fp16"]
GradientCodec = Literal["full", "int8", "int4", "2bit", "ternary", "onebit", "topk", "low_rank"] | ClassPath
ParameterCodec = Literal["full", "int8", "int4", "2bit", "ternary", "onebit", "topk"]
SinkName = Literal["tensorboard", "wandb", "mlflow"]
Sinks = Annotated[tuple[SinkName, ...], Strict(), BeforeValidator(as_tuple)]


class Parallel(Section):
    """Number of ranks along each mesh axis; their product is the number of ranks."""

    data: Auto | Count = Field("auto", description="data-parallel ranks; auto: number of ranks / all other axes")
    tensor: Count = Field(1, description="ranks that share each layer's matrices")
    pipeline: Count = Field(1, description="ranks that hold successive groups of layers")
    sequence: Count = Field(1, description="ranks that share each sample's sequence")
    schedule: Literal["1f1b", "gpipe", "interleaved", "zero_bubble"] = Field(
        "1f1b", description="order of the micro-batches' forwards and backwards on the pipeline's ranks"
    )
    chunks: Count = Field(1, description="groups of layers that each pipeline rank holds (interleaved: at least 2)")
    cut: Auto | SomeTexts = Field(
        "auto", description="names of the first blocks of the pipeline's groups of layers; auto: equal cost"
    )
    tensor_rules: TensorRules = Field(
        (), description="how modules are split over the tensor ranks, by class name or name pattern; takes precedence"
    )

    @property
    def num_chunks(self) -> int:
        """Groups of layers that a rank runs one after another: ``chunks``, or 1 without a pipeline."""
        return self.chunks if self.pipeline > 1 else 1


class Offload(Section):
    """Memory tier of each state: the device, the host's memory, or the disk."""

    parameters: Tier = Field("none", description="tier of the parameters; auto: as much as fits")
    optimizer: Tier = Field("none", description="tier of master weights and moments; auto: as much as fits")
    gradients: Tier = Field("auto", description="tier of the gradients; auto: where the optimizer states are")
    path: PathText | None = Field(None, description="folder of the disk tier; null: the system's temporary folder")


class Zero(Section):
    """Sharding of the training states over the data-parallel ranks."""

    stage: Stage = Field(
        1, description="what is sharded: 0 nothing, 1 optimizer states, 2 gradients too, 3 parameters too"
    )
    offload: Offload = Field(Offload(), description="memory tier of each state")
    units: Auto | SomeTexts = Field(
        "auto",
        description="class names or name patterns of the modules whose parameters are gathered together; auto: the "
        "repeated blocks",
    )
    prefetch_bytes: Auto | Bytes = Field(
        "auto", description="stage 3: bytes of parameters gathered ahead of use (0: none)"
    )
    keep_gathered: Flag = Field(False, description="stage 3: do not reshard parameters between forward and backward")
    keep_gradients: Flag = Field(
        False,
        description="with keep_gathered: accumulate unsharded gradients over micro-batches, and reduce them once per "
        "step",
    )
    hierarchical: Flag = Field(
        False,
        description="stage 3: backward gathers inside the node, from a secondary shard; if communication.parameters is "
        "quantized, forward does, too, and updates are sent between nodes as parameter deltas",
    )
    replicate: Literal["none", "nodes"] = Field(
        "none", description="stage 3: nodes shards all states only within a node, so that every node has a replica"
    )


class Precision(Section):
    """The dtype of each state."""

    compute: Compute = Field(
        "auto", description="dtype of forward and backward; auto: bf16 on an accelerator, fp32 on CPU"
    )
    mode: Literal["mixed", "autocast", "cast"] = Field(
        "mixed",
        description="mode of 16-bit compute; mixed: 16-bit parameters, forward under torch.autocast; autocast: the "
        "same with fp32 parameters; cast: parameters, buffers and arguments are cast, without autocast",
    )
    outputs: Literal["fp32", "compute"] = Field(
        "fp32", description="dtype of the model's outputs under 16-bit compute; compute: as the model returns them"
    )
    master: Literal["fp32", "split"] = Field(
        "fp32",
        description="master weights; fp32: a separate copy; split: the bf16 parameter and the 16 remaining bits",
    )
    frozen: Literal["fp32", "compute"] = Field(
        "fp32",
        description="frozen fp32 parameters under 16-bit compute; fp32: keep their fp32 values as master weights; "
        "compute: round them permanently, which saves memory",
    )
    gradients: Gradients = Field(
        "fp32",
        description="dtype in which gradients are stored and communicated; in_backward: fp32, not stored, because each "
        "unit is updated in backward",
    )
    moments: Literal["fp32", "int8"] = Field("fp32", description="the optimizer's running averages")
    loss_scale: Literal["dynamic"] | Positive = Field(
        "dynamic", description="factor of the loss under fp16 compute; dynamic: adapted to the largest without overflow"
    )
    initial_loss_scale: Positive = Field(2.0**16, description="dynamic loss scale: the factor of the first step")
    loss_scale_window: Count = Field(
        2000, description="dynamic loss scale: steps without an overflow after which the factor doubles"
    )
    nonfinite: Literal["skip", "raise", "rewind"] = Field(
        "skip",
        description="action if loss or gradients are not finite: skip the update, raise an error, or load the newest "
        "checkpoint",
    )
    keep_fp32: Texts = Field((), description="module class names or name patterns of modules that compute in fp32")


class Batch(Section):
    """Samples: total = micro x accumulate x data ranks. A missing value is computed from the others; default 1."""

    micro: Auto | Count = Field("auto", description="samples per rank in one forward")
    accumulate: Auto | Count = Field("auto", description="micro-batches between two optimizer steps")
    total: Auto | Count = Field("auto", description="samples of one optimizer step, over all ranks")


class Muon(Section):
    """Settings of ``optimizer.name: muon``.

    ``optimizer.betas`` and ``optimizer.eps`` are those of the AdamW for parameters that are no matrices.
    """

    momentum: Share = Field(0.95, description="decay of the running average of gradients")
    nesterov: Flag = Field(True, description="orthogonalize a mean of the gradient and the running average")
    steps: Count = Field(5, description="steps of the Newton-Schulz iteration")
    coefficients: Coefficients = Field((3.4445, -4.775, 2.0315), description="a, b and c of the iteration")
    scale: Literal["rms", "spectral", "original"] = Field(
        "rms",
        description="factor of the update of a matrix with o outputs and i inputs; rms: 0.2 sqrt(max(o, i)), which "
        "suits learning rates of AdamW; spectral: sqrt(o / i); original: sqrt(max(1, o / i))",
    )
    dtype: Literal["auto", "fp32", "bf16"] = Field(
        "auto", description="dtype of the iteration; auto: bf16 on accelerators, fp32 on the CPU"
    )
    adamw_lr: NotNegative | None = Field(None, description="learning rate of AdamW; null: optimizer.lr")
    rules: MatrixRules = Field(
        (),
        description="patterns of parameter names, each with muon, adamw, or the number of matrices with equal numbers "
        "of outputs that the parameter consists of; the first pattern that matches a name decides",
    )


class Optimizer(Section):
    """The optimizer that is built if none is passed to ``initialize``."""

    name: Literal["adamw", "adam", "sgd", "lion", "muon", "onebit_adam"] = Field(
        "adamw",
        description="adamw, adam, sgd, lion; muon: orthogonalized momentum for matrices, AdamW for the rest; "
        "onebit_adam: Adam whose second moment is frozen after a warm-up "
        "(communication.warmup_steps)",
    )
    lr: NotNegative = Field(1.0e-3, description="learning rate (the highest of the schedule)")
    betas: SharePair = Field((0.9, 0.999), description="decay of the two running averages (not sgd)")
    eps: Positive = Field(1.0e-8, description="added to the divisor (not sgd and lion)")
    weight_decay: NotNegative = Field(
        0.01, description="weight decay: decoupled in adamw, onebit_adam, lion and muon, L2 in adam and sgd"
    )
    momentum: Share = Field(0.0, description="decay of the running average (sgd only)")
    sends: Literal["averages", "gradients"] = Field(
        "averages",
        description="onebit_adam: what ranks send after the warm-up: quantized running averages of gradients, or "
        "gradients (encoded by communication.gradients)",
    )
    muon: Muon = Field(Muon(), description="settings of muon")


class Schedule(Section):
    """The learning rate over optimizer steps: a warm-up to the highest, then the named curve."""

    name: Literal["constant", "linear", "cosine"] = Field("constant", description="the curve after the warm-up")
    warmup_steps: CountOrZero = Field(0, description="optimizer steps of warm-up")
    warmup: Literal["linear", "log"] = Field("linear", description="how the rate rises in the warm-up")
    max_lr: Positive | None = Field(
        None, description="highest learning rate of all parameter groups; null: each group's own (optimizer.lr)"
    )
    initial_lr: NotNegative | None = Field(
        None, description="learning rate at which the warm-up starts; null: it starts one increment above 0"
    )
    initial_steps: CountOrZero = Field(0, description="optimizer steps at initial_lr, before the warm-up")
    total_steps: Count | None = Field(None, description="optimizer steps, warm-up included, until min_lr is reached")
    decay_steps: Count | None = Field(
        None, description="length of the curve, which ends at total_steps; null: all steps after the warm-up"
    )
    min_lr: NotNegative = Field(0.0, description="learning rate at and after total_steps")
    min_ratio: Ratio = Field(0.0, description="min_lr relative to each parameter group's highest learning rate")


class Activations(Section):
    """Activations that forward saves for backward, and their memory tier."""

    checkpoint: Literal["none", "units", "selective"] | SomeTexts = Field(
        "none",
        description="modules that are recomputed in backward: units; selective: units, except matrix products, "
        "convolutions and attention, whose results are saved; or class names or name patterns of modules",
    )
    partition: Flag = Field(
        False,
        description="shard the saved inputs of recomputed modules over the tensor ranks, which have equal ones, and "
        "gather them ahead of backward",
    )
    offload: Literal["none", "host", "disk"] = Field(
        "none", description="memory tier of the inputs of recomputed modules between forward and backward"
    )
    keep_bytes: Literal["none", "auto"] | Bytes = Field(
        "none",
        description="bytes of activations that the last modules in forward save instead of recomputing them; auto: the "
        "bytes that are free after the first step",
    )


class AttentionSection(Section):
    """Block-sparse attention: the keys that each query attends to."""

    pattern: Literal["dense", "sliding", "fixed", "variable", "bigbird", "longformer", "user"] = Field(
        "dense", description="keys that each query attends to; dense: the model's own attention, unchanged"
    )
    block: Count = Field(64, description="positions in a block, the unit in which attention is computed or skipped")
    window: Windows | None = Field(
        None,
        description="positions, as in transformers' sliding_window; fixed: positions of each window; variable: a list, "
        "whose last entry repeats",
    )
    random: CountOrZero = Field(
        0, description="random blocks of keys that each block of queries attends to (bigbird, variable)"
    )
    causal: Auto | Flag = Field("auto", description="mask later positions; auto: as each module does")
    layers: Auto | SomeTexts = Field(
        "auto", description="class names or name patterns of the modules with the pattern; auto: all self-attention"
    )
    layout: Rows = Field(
        (), description="user: a row of 0 and 1 for each block of queries, with one digit for each block of keys"
    )
    packed: Flag = Field(
        False,
        description="dense: skip blocks between different documents that are packed into a sample (position_ids)",
    )


_GLOBAL = Field(0, description="blocks of keys that all queries attend to: the first; fixed: the last of each window")
_KEYWORD: dict[str, Any] = {"global": (CountOrZero, _GLOBAL)}  # `global` is a keyword, so a class body cannot define it
Attention = create_model(
    "Attention", __base__=AttentionSection, __module__=__name__, __doc__=AttentionSection.__doc__, **_KEYWORD
)


class Compile(Section):
    """Modules that torch.compile compiles, each as a region of its own."""

    modules: Literal["none", "units", "model"] | SomeTexts = Field(
        "none",
        description="units: the units of parameters (blocks); model: the full model, below stage 3; or class names or "
        "name patterns of modules",
    )
    backend: Text = Field("inductor", description="the backend of torch.compile")
    mode: Literal["default", "max-autotune-no-cudagraphs"] = Field("default", description="the mode of torch.compile")
    dynamic: Flag | None = Field(
        None, description="compile for all shapes (true) or for each shape (false); null: as torch.compile chooses"
    )


class Loss(Section):
    """Computation of the loss from the last hidden states."""

    tiled: Literal["none", "auto"] | Bytes = Field(
        "none",
        description="compute logits and their cross-entropy in tiles, without storing all logits: bytes of the logits "
        "of a tile; auto: chosen for the layer",
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
        description="class names or name patterns of modules that compute each position independently: they run on "
        "some positions at a time, and are recomputed in backward",
    )


class Communication(Section):
    """Communication between ranks: encodings, intervals and limits."""

    gradients: GradientCodec = Field(
        "full",
        description="format of communicated gradients; full: precision.gradients; int8, int4: quantized in blocks with "
        "stochastic rounding, and summed in fp32; with error feedback: 2bit, ternary, onebit, topk (coarser, rounded "
        "to nearest), low_rank (two low-rank factors per matrix: PowerSGD) and module:class (your own "
        "partita.kernels.codecs.TorchCodec); sums are sent back as int8, or with error feedback, too",
    )
    low_rank: Count = Field(4, description="columns of each factor of gradients: low_rank")
    parameters: ParameterCodec = Field(
        "full",
        description="format of communicated parameters; full: precision.compute. Stage 3: all-gathers in int8. Stages "
        "1 and 2, and between the nodes of zero.hierarchical: parameter deltas in int8, int4, 2bit, ternary, onebit or "
        "topk, with error feedback",
    )
    warmup_steps: Auto | CountOrZero = Field(
        "auto",
        description="optimizer steps before compression starts; auto: none; onebit_adam: 15 % of schedule.total_steps",
    )
    warmup: Literal["full", "int8"] = Field(
        "full", description="communication format in the steps before compression starts: full, or int8"
    )
    every: Count | None = Field(
        None,
        description="optimizer steps between two synchronizations of replicas, which train independently (DiLoCo); "
        "communication.gradients is then the format of their differences; null: they exchange every gradient",
    )
    replicas: Auto | Count = Field("auto", description="every: number of replicas (groups of data ranks); auto: nodes")
    outer_lr: Positive = Field(0.7, description="every: learning rate of DiLoCo's outer optimizer")
    outer_momentum: Share = Field(0.9, description="every: momentum of DiLoCo's outer optimizer")
    outer_nesterov: Flag = Field(True, description="every: Nesterov momentum in DiLoCo's outer optimizer")
    check_every: Auto | CountOrZero = Field(
        "auto",
        description="optimizer steps between two checks that ranks with the same parameters have the same bits; 0: "
        "never; auto: 100 if quantized parameter deltas are communicated, else never",
    )
    buffers: Literal["broadcast", "local"] = Field(
        "broadcast", description="buffers that change (BatchNorm): broadcast from rank 0, or local to each rank"
    )
    within_node: Literal["auto", "memory", "network"] = Field(
        "auto", description="CPU: ranks of a node read each other's memory (auto: if the system permits it)"
    )
    reduction: Literal["auto", "ordered"] = Field(
        "auto",
        description="GPU: order in which ranks' values are summed. auto: the order of NCCL. ordered: by rank, so that "
        "results are bitwise those of other stages, also on more than two GPUs; it takes more and smaller messages",
    )
    through_host: Flag = Field(
        False,
        description="GPU: communicate through host memory, over gloo instead of NCCL. Ranks can then share a GPU, for "
        "tests; it is slow",
    )
    timeout_s: Positive = Field(600.0, description="seconds that a collective may take before it is an error")


class Checkpoint(Section):
    """Saving while training."""

    dir: PathText | None = Field(None, description="folder of the checkpoints; null: none are saved")
    every_steps: Count | None = Field(None, description="optimizer steps between two checkpoints")
    keep: Count = Field(3, description="number of the newest checkpoints that are kept")
    background: Flag = Field(True, description="write while training continues")


class Metrics(Section):
    """Values that a training loop logs by ``engine.log``."""

    dir: PathText | None = Field(None, description="folder of metrics.jsonl; null: engine.log is an error")
    sinks: Sinks = Field((), description="where metrics are shown, too: any of tensorboard, wandb, mlflow")


class Config(Section):
    """The full configuration of an engine.

    Raises:
        ConfigError: a key is unknown or a value is wrong; the message lists all of them.
    """

    parallel: Parallel = Field(Parallel(), description="ranks along each mesh axis")
    zero: Zero = Field(Zero(), description="sharding and offload of states")
    precision: Precision = Field(Precision(), description="the dtype of each state")
    batch: Batch = Field(Batch(), description="samples of a step")
    optimizer: Optimizer = Field(Optimizer(), description="the optimizer")
    schedule: Schedule = Field(Schedule(), description="the learning rate over steps")
    clip_grad_norm: Positive | None = Field(None, description="maximum global gradient norm; null: not clipped")
    activations: Activations = Field(Activations(), description="activations saved for backward")
    attention: Attention = Field(Attention(), description="block-sparse attention")
    compile: Compile = Field(Compile(), description="modules that are compiled")
    loss: Loss = Field(Loss(), description="how the loss is computed")
    tiled: Tiled = Field(Tiled(), description="modules that are computed tile by tile")
    communication: Communication = Field(Communication(), description="communication between ranks")
    checkpoint: Checkpoint = Field(Checkpoint(), description="saving while training")
    metrics: Metrics = Field(Metrics(), description="values that a training loop logs")
    seed: CountOrZero | None = Field(
        None, description="seed of dropout and other random numbers, independent of parallelism; null: random"
    )

    def __init__(self, /, **sections: Any) -> None:
        self._fill(sections, lambda path: "")

    @classmethod
    def located(cls, sections: Mapping[str, object], where: Where) -> Self:
        """Return the configuration with these sections; in errors, ``where(path)`` is the source of a key."""
        config = cls.__new__(cls)
        config._fill(sections, where)
        return config

    def _fill(self, sections: Mapping[str, object], where: Where) -> None:
        data = plain(sections, "the configuration")
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise report(validation_problems(error, type(self), data), where) from None
