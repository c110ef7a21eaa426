"""A training job: its model, its text, its length and its engine.

The ``engine`` section is the full configuration of :func:`partita.initialize`; the others are the trainer's own.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, Strict, ValidationError, WithJsonSchema

from partita.config.load import read_sections
from partita.config.messages import Problem, Where, report, validation_problems
from partita.config.schema import Config, Metrics, SinkName, Sinks
from partita.config.values import (
    Auto,
    Count,
    CountOrZero,
    Flag,
    NotNegative,
    PathText,
    Positive,
    Section,
    Share,
    SomeTexts,
    Text,
)
from partita.errors import ConfigError
from partita.observe.sinks import check_installed, installed

_HUGGINGFACE_SCHEMA = {
    "anyOf": [
        {"const": "the path of a model folder"},
        {"const": "the path of a config.json"},
        {"const": "a section such as {model_type: llama, hidden_size: 64}"},
        {"type": "null"},
    ]
}
HuggingFace = Annotated[PathText | dict[str, Any] | None, WithJsonSchema(_HUGGINGFACE_SCHEMA, mode="serialization")]
Weight = Annotated[float, Strict(), Field(gt=0, lt=1, allow_inf_nan=False)]
Format = Literal["text", "jsonl", "parquet", "hf"]
# Value of engine.schedule.total_steps until Job.with_steps knows the steps that train.epochs are.
_UNKNOWN_STEPS = 2**31 - 1
# A sample of documents is checked with two of them, each of which predicts at least one token.
_SHORTEST_SAMPLE = 4


class LoraSection(Section):
    """Low-rank adapters (peft's LoRA), which are trained instead of the model's own weights."""

    r: CountOrZero = Field(0, description="rank of the adapters; 0: no adapters, all weights are trained")
    alpha: Positive = Field(16, description="scale of the adapters: their output is multiplied by alpha / r")
    target_modules: Text | SomeTexts | None = Field(
        None, description="names of the linear layers; all-linear: every one; null: peft's choice for the architecture"
    )
    dropout: Share = Field(0.0, description="dropout of the adapters' input")


class ModelSection(Section):
    """The partita decoder of these sizes, or a Hugging Face causal language model."""

    huggingface: HuggingFace = Field(None, description="folder or config of a causal language model to train instead")
    lora: LoraSection = Field(LoraSection(), description="train adapters of the model in a folder")
    layers: Count = Field(4, description="transformer blocks")
    width: Count = Field(128, description="size of the residual stream")
    heads: Count = Field(4, description="query heads")
    kv_heads: Auto | Count = Field("auto", description="key and value heads; auto: as many as query heads")
    ffn_multiple: Positive = Field(2.75, description="feed-forward width / width; the former is a multiple of 16")
    tied: Flag = Field(False, description="one matrix for the embedding and the output")
    seed: CountOrZero = Field(0, description="seed of the initial weights")


class DataSection(Section):
    """The text or the documents, and how samples are cut from them."""

    corpus: PathText = Field(
        "stdlib",
        description="a file or folder (hf: or the name of a data set); stdlib: the text of Python's standard library",
    )
    format: Format = Field("text", description="text: one text; jsonl, parquet, hf: documents, one in each row")
    pattern: Text = Field("*", description="names of the files to read in a folder, at any depth")
    field: Text = Field("text", description="the field of a row that has the document, or its list of messages")
    chat_template: PathText | None = Field(
        None,
        description="the field has messages (role, content), which a template turns into a document. tokenizer: its "
        "own one; otherwise the path of a Jinja file",
    )
    predict: Literal["all", "answers"] = Field(
        "all",
        description="the tokens whose loss counts: all of a document; or, with chat_template, only those of the "
        "assistant's messages",
    )
    split: Text = Field("train", description="hf: the split to read")
    tokenizer: PathText | None = Field(None, description="folder of a tokenizer; null: that of the model's folder")
    cache: PathText | None = Field(
        None, description="folder of the documents' tokens, which runs may share; null: tokens/ in train.out"
    )
    stream: CountOrZero = Field(
        0,
        description="rows per block, if rank 0 reads documents during training; 0: all rows are read before it",
    )
    pack: Flag = Field(True, description="pack several documents into a sample; false: one, filled up with padding")
    sequence: Count = Field(128, description="tokens of a sample")
    held_out: Weight = Field(
        0.02, description="share of the text or documents (of a stream: of its first block) that is never trained on"
    )
    seed: CountOrZero = Field(0, description="seed of the split and of the order of samples")


class SampleSection(Section):
    """The text written by the model at the end."""

    prompt: Text = Field("def ", description="how the sample begins")
    tokens: CountOrZero = Field(300, description="tokens (bytes, without a tokenizer) to write; 0: no sample")
    temperature: NotNegative = Field(0.7, description="0: always the likeliest token")
    seed: CountOrZero = Field(0, description="seed of the draws")


class TrainSection(Section):
    """Length of the training, and its outputs."""

    steps: Count = Field(1000, description="optimizer steps")
    epochs: Positive | None = Field(
        None, description="passes over the training data, instead of steps; the last step is filled up"
    )
    log_every: Count = Field(10, description="steps between two rows of metrics; a row is the mean over them")
    eval_every: Count = Field(250, description="steps between two evaluations on held-out text")
    eval_batches: Count = Field(16, description="batches (of engine.batch.total samples) in an evaluation")
    metrics: Auto | Sinks = Field(
        "auto",
        description="metrics sinks besides metrics.jsonl: any of tensorboard, wandb, mlflow; auto: TensorBoard, if it "
        "is installed",
    )
    profile: CountOrZero = Field(
        0, description="steps, after the first ones, whose timeline is written: trace-RANK.json.gz, for ui.perfetto.dev"
    )
    out: PathText | None = Field(
        None,
        description="folder of all results; null: runs/ and the name of the job file, "
        "with a number if that holds an earlier run",
    )
    overwrite: Flag = Field(False, description="replace the results of an earlier run in out")
    sample: SampleSection = Field(SampleSection(), description="the text written at the end")


class Job(Section):
    """A complete job. Build one with :func:`load_job`, whose errors also show where a wrong key was written."""

    model: ModelSection = Field(ModelSection(), description="what to train")
    data: DataSection = Field(DataSection(), description="what to train on")
    train: TrainSection = Field(TrainSection(), description="how long, and what to write down")
    engine: Config = Field(Config(), description="how the training states are split and updated")

    @property
    def out(self) -> Path:
        """The folder of all results."""
        assert self.train.out is not None, "set by load_job"
        return Path(self.train.out)

    @property
    def sinks(self) -> tuple[SinkName, ...]:
        """The sinks that show the metrics."""
        if self.train.metrics == "auto":
            return ("tensorboard",) if installed("tensorboard") else ()
        return self.train.metrics

    def with_steps(self, steps: int) -> "Job":
        """Return the job with ``steps`` optimizer steps in place of ``train.epochs``.

        Raises:
            ConfigError: the steps do not fit the schedule.
        """
        train = self.train.model_copy(update={"steps": steps, "epochs": None})
        engine = self.engine
        if engine.schedule.total_steps == _UNKNOWN_STEPS:
            sections = engine.model_dump(exclude_unset=True)
            sections["schedule"]["total_steps"] = steps
            engine = Config.located(sections, lambda path: f"train.epochs: {self.train.epochs:g}")
        return self.model_copy(update={"train": train, "engine": engine})


def load_job(source: str | Path | Mapping[str, object], overrides: Sequence[str] = ()) -> Job:
    """Return the job in ``source``, with overrides such as "train.steps=10".

    ``source`` is the path of a YAML or JSON file, or a mapping. If a schedule needs ``engine.schedule.total_steps`` and
    it is not set, it is ``train.steps``, or what :meth:`Job.with_steps` sets in place of ``train.epochs``.

    Raises:
        ConfigError: the source cannot be read, or has wrong values (the message names each key and where it was
            written); or a library that ``train.metrics`` names is missing.
    """
    sections, where = read_sections(source, overrides)
    engine = sections.pop("engine", None)
    try:
        job = Job.model_validate(sections)
    except ValidationError as error:
        raise report(validation_problems(error, Job, sections), where) from None
    if problems := [*_model_problems(job.model), *_data_problems(job), *_length_problems(job)]:
        raise report(problems, where)
    check_installed(job.sinks, "train.metrics")
    config = _engine_config(engine, job.train.steps if job.train.epochs is None else _UNKNOWN_STEPS, where)
    if config.metrics != Metrics():
        problem = "engine.metrics: is for loops that call engine.log; the trainer writes its metrics into train.out"
        raise report([Problem(("engine", "metrics"), problem, "set train.out and train.metrics instead")], where)
    out = job.train.out or str(default_out(source))
    data = job.data
    if data.format != "text" and data.cache is None and not data.stream:
        data = data.model_copy(update={"cache": str(Path(out, "tokens"))})
    train = job.train.model_copy(update={"out": out})
    return job.model_copy(update={"engine": config, "train": train, "data": data})


def default_out(source: str | Path | Mapping[str, object]) -> Path:
    """Return the folder of the results of a job that names none."""
    return Path("runs", "job" if isinstance(source, Mapping) else Path(source).stem)


def _engine_config(engine: object, steps: int, where: Where) -> Config:
    if isinstance(engine, Config):
        return engine
    if engine is not None and not isinstance(engine, Mapping):
        raise ConfigError(f"engine: expected a section with the keys {', '.join(Config.model_fields)}; got {engine!r}")
    sections = dict(engine or {})
    schedule = sections.get("schedule")
    if isinstance(schedule, Mapping) and schedule.get("name", "constant") != "constant":
        configured = schedule.get("total_steps")
        sections["schedule"] = {**schedule, "total_steps": steps if configured is None else configured}
    return Config.located(sections, lambda path: where(("engine", *path)))


def _model_problems(model: ModelSection) -> list[Problem]:
    """Return the problems that pydantic cannot see: sizes that do not fit together, and keys without effect."""
    found: dict[str, tuple[str, str]] = {}
    heads, kv_heads = model.heads, model.kv_heads
    if model.lora.r == 0 and model.lora != LoraSection():
        found["lora"] = ("without model.lora.r there are no adapters", "set model.lora.r to their rank, such as 8")
    if model.lora.r and not isinstance(model.huggingface, str):
        found["lora"] = (
            "adapters change a model that has weights, and there is no folder with some",
            "set model.huggingface to the folder of a model",
        )
    if model.huggingface is not None:
        for name, value in model:
            if name not in ("huggingface", "lora", "seed") and value != ModelSection.model_fields[name].default:
                found[name] = "has no effect on a Hugging Face model", "remove it, or set it under model.huggingface"
    else:
        if model.width % heads or model.width // heads % 2:
            found["width"] = (
                f"{model.width} over model.heads {heads} must give heads of one even size",
                f"set model.width to a multiple of {2 * heads}",
            )
        if kv_heads != "auto" and heads % kv_heads:
            divisors = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
            found["kv_heads"] = f"{kv_heads} does not divide model.heads {heads}", f"set one of {divisors}"
    return [Problem(("model", name), f"model.{name}: {text}", fix) for name, (text, fix) in found.items()]


def _data_problems(job: Job) -> list[Problem]:
    """Return keys of the data section without effect, and documents that the model or the sizes do not fit."""
    data = job.data
    given = {name for name, field in DataSection.model_fields.items() if getattr(data, name) != field.default}
    found: dict[str, tuple[str, str]] = {}
    if data.format == "text":
        for name in sorted(given & {"field", "chat_template", "predict", "split", "cache", "stream", "pack"}):
            found[name] = ("has no effect with data.format: text", "remove it, or set data.format to that of the rows")
        if data.tokenizer is not None and job.model.huggingface is None:
            found["tokenizer"] = ("the partita decoder reads bytes", "remove it, or set model.huggingface")
    else:
        for name in sorted(given & ({"pattern"} if data.format == "hf" else {"split"})):
            found[name] = (f"has no effect with data.format: {data.format}", "remove it")
        if data.stream and data.cache is not None:
            found["cache"] = ("a stream of documents is not stored", "remove it, or data.stream")
        if data.predict == "answers" and data.chat_template is None:
            found["predict"] = (
                "answers needs conversations",
                "set data.chat_template to tokenizer or to a Jinja file, or data.predict to all",
            )
        if job.model.huggingface is None:
            found["format"] = (
                f"{data.format} has documents, which need a tokenizer, and the partita decoder reads bytes",
                "set model.huggingface to the folder of a model, or data.format to text",
            )
        if "corpus" not in given:
            found["corpus"] = (f"data.format: {data.format} needs rows", "set data.corpus to their file or folder")
        if data.sequence < _SHORTEST_SAMPLE:
            found["sequence"] = (
                f"{data.sequence} tokens are too few for a sample of documents",
                f"set data.sequence to at least {_SHORTEST_SAMPLE}",
            )
    return [Problem(("data", name), f"data.{name}: {text}", fix) for name, (text, fix) in found.items()]


def _length_problems(job: Job) -> list[Problem]:
    """Return contradictions between ``train.epochs`` and other keys."""
    train = job.train
    if train.epochs is None:
        return []
    text = f"train.epochs: {train.epochs:g} epochs "
    if "steps" in train.model_fields_set:
        return [
            Problem(
                ("train", "epochs"), f"{text}and train.steps: {train.steps} both set the length", "remove one of them"
            )
        ]
    if job.data.stream:
        return [
            Problem(
                ("train", "epochs"),
                f"{text}of a stream (data.stream) have an unknown number of steps",
                "set train.steps instead",
            )
        ]
    return []
