"""``partita plan``: it finds plans that fit, reports the missing memory of others, and its config trains."""

import itertools
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from transformers import LlamaConfig
from typer.testing import CliRunner

import partita
from partita import ConfigError
from partita.cli.main import app
from partita.config.resolve import resolve
from partita.layout.blueprint import make_blueprint
from partita.layout.state_bytes import ADAM_MOMENTS, model_state_bytes
from partita.layout.working_bytes import working_bytes
from partita.prediction.communication_settings import HIERARCHICAL, STAGE_DEFAULT, CommunicationSettings
from partita.prediction.communication_variants import MIN_GAIN
from partita.prediction.given_config import estimate_config
from partita.prediction.machine import machine_named, machines
from partita.prediction.model_source import presets, read_source
from partita.prediction.plan import Plan
from partita.prediction.plan_settings import PlanSettings, StatePrecision, StateSettings
from partita.prediction.search import Forecast, Search
from partita.prediction.simulate.cluster import Cluster, simulate
from partita.prediction.simulate.rank import SimulatedModel
from partita.table.mesh_shape import MeshShape
from partita.table.residence import Tier
from partita.table.state_plan import Tiers

SMALL = "layers=6,hidden=512,heads=8,vocab=1000,context=256"
run = CliRunner().invoke


@pytest.fixture(scope="module")
def plan() -> Plan:
    return partita.plan("llama-3-8b", gpus=8, gpu="h100")


def test_the_best_plan_fits_and_its_config_is_one(plan: Plan) -> None:
    best = plan.best
    assert best is not None
    assert best.time is not None
    config = partita.Config(**plan.config())
    resolved = resolve(config, 8, "cuda", 8)
    assert (resolved.mesh, resolved.batch.micro) == (best.settings.mesh, best.settings.micro)
    assert resolved.batch.total == plan.samples
    assert best.by_tier[Tier.DEVICE] <= 80e9
    assert best.time.compute_s <= best.time.total_s
    times = [each.time.total_s for each in plan.forecasts if each.time is not None]
    assert times == sorted(times)


@pytest.mark.parametrize("units", ["auto", ["Attention"], ["Attention", "FeedForward"]])
def test_pipeline_ranks_have_all_parameters(units: str | list[str]) -> None:
    config = {"zero": {"units": units}, "parallel": {"pipeline": 2}, "precision": {"compute": "fp32"}}
    source = read_source(f"family=llama,{SMALL}")  # without tied parameters, which both ranks have
    estimate = estimate_config(source, config, 2, "cuda", 2)
    held = [estimate.held(stage)["parameters", "device"] for stage in estimate.stages]
    assert sum(held) == pytest.approx(4 * source.num_params, rel=1e-3), "the rest is padding"


def test_the_config_keeps_the_settings_of_every_plan(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "zero": {"units": ["Block"], "offload": {"path": str(tmp_path)}},
        "precision": {"keep_fp32": ["LayerNorm"]},
        "optimizer": {"name": "sgd", "lr": 0.5},
        "parallel": {"schedule": "gpipe", "tensor": 4},
        "batch": {"total": 3},
        "activations": {"checkpoint": ["blocks.0"]},
        "clip_grad_norm": 1.0,
    }
    found = partita.plan(SMALL, gpus=1, gpu="h100", samples=8, config=given)
    assert found.best is not None
    on_host = replace(found.best, settings=replace(found.best.settings, states=StateSettings(1, optimizer="host")))
    config = replace(found, forecasts=(on_host,)).config()
    assert config["zero"] == {
        "units": ["Block"],
        "stage": 1,
        "offload": {"path": str(tmp_path), "optimizer": "host"},
    }
    assert config["precision"] == {"keep_fp32": ["LayerNorm"], "compute": "bf16"}
    assert (config["optimizer"], config["clip_grad_norm"]) == ({"name": "sgd", "lr": 0.5}, 1.0)
    assert config["parallel"] == {"schedule": "gpipe"}, "axes are searched"
    assert config["batch"] == {"micro": found.best.settings.micro, "accumulate": found.best.settings.accumulate}
    assert config.get("activations", {}).get("checkpoint", "none") == found.best.settings.checkpoint


def test_a_named_compute_dtype_is_that_of_every_plan() -> None:
    found = partita.plan(SMALL, gpu="h100", samples=8, config={"precision": {"compute": "fp32"}})
    assert found.config()["precision"]["compute"] == "fp32"
    assert found.best is not None
    assert found.best.settings.states.precision.name == "fp32"


def made(plan: Plan, seconds: float, device_bytes: int, precision: StatePrecision) -> Forecast:
    """Return a forecast that fits, with this time, device memory and precision of the states."""
    some = next(each for each in plan.forecasts if each.fits)
    settings = replace(some.settings, states=StateSettings(1, precision=precision))
    time: Any = SimpleNamespace(total_s=seconds)
    return replace(some, settings=settings, held={("parameters", "device"): device_bytes}, time=time)


def test_of_plans_that_are_as_fast_the_exact_one_with_most_memory_free_is_best(plan: Plan) -> None:
    exact, lossy = StatePrecision("exact"), StatePrecision("lean", (("moments", "int8"),))
    fastest, free = made(plan, 1.0, 300, exact), made(plan, 1.015, 100, exact)
    slow = made(plan, 1.03, 1, exact)
    lean, very_lean = made(plan, 0.99, 10, lossy), made(plan, 0.5, 10, lossy)

    def best_of(*forecasts: Forecast, lean: bool = False) -> Forecast | None:
        ordered = tuple(sorted(forecasts, key=lambda each: each.rank))
        return replace(plan, forecasts=ordered, lean=lean).best

    assert best_of(fastest, free, slow) == free
    assert best_of(fastest, free, slow, very_lean) == free, "lossy states are not chosen where exact ones fit"
    assert best_of(fastest, free, lean, lean=True) == fastest, "of plans that are as fast an exact one is chosen"
    assert best_of(fastest, free, very_lean, lean=True) == very_lean
    assert best_of(lean, very_lean) == very_lean, "where nothing exact fits"
    assert best_of() is None
    assert replace(plan, forecasts=(very_lean, fastest, free)).best_per_state_settings[0] == free


def test_the_best_plan_of_a_model_is_exact_where_one_fits(plan: Plan) -> None:
    assert plan.best is not None
    assert plan.best.settings.states.precision.is_exact
    assert "precision" not in plan.config() or plan.config()["precision"].keys() == {"compute"}


def test_what_does_not_fit_says_which_memory_and_by_how_much(plan: Plan) -> None:
    whole = next(
        each for each in plan.forecasts if each.settings.states == StateSettings(0) and each.settings.mesh.data == 8
    )
    num = plan.source.num_params
    assert not whole.fits
    states = sum(whole.held[state, "device"] for state in ("parameters", "gradients", "master", "moments"))
    assert states == pytest.approx(18 * num, rel=1e-3)
    assert whole.shortfall[Tier.DEVICE] == whole.by_tier[Tier.DEVICE] - whole.budget.device


@pytest.mark.parametrize(("stage", "optimizer"), [(1, "none"), (3, "none"), (2, "host"), (3, "disk")])
@pytest.mark.parametrize("units", ["auto", ["Attention"], ["FeedForward", "LayerNorm"], ["Embedding"]])
def test_states_are_the_blueprint_s(stage: int, optimizer: str, units: str | list[str]) -> None:
    """The search plans each kind of unit once, and has the same bytes as the blueprint, which plans every unit."""
    source = read_source(SMALL)
    search = Search(source, machine_named("h100"), 4, 64, partita.Config(zero={"units": units}))
    mesh = MeshShape(data=4)
    resolved = search._resolved(mesh, StateSettings(stage, optimizer=optimizer))
    tier = {"none": Tier.DEVICE, "host": Tier.HOST, "disk": Tier.DISK}[optimizer]
    found = search.rank_model(MeshShape())
    units = found.planned(resolved, Tiers(Tier.DEVICE, tier, tier), found.stages(1)[0])
    expected = make_blueprint(source.model, resolved).units
    assert model_state_bytes(units, None) == model_state_bytes(expected, None)
    for on_host in (True, False):
        assert working_bytes(units, "auto", ADAM_MOMENTS, on_host=on_host) == working_bytes(
            expected, "auto", ADAM_MOMENTS, on_host=on_host
        )


@pytest.mark.thorough
def test_offload_is_for_what_does_not_fit_without_it() -> None:
    with_host = partita.plan("gpt-13b", gpu="v100-32").best
    assert with_host is not None
    assert with_host.settings.states.optimizer == "host"
    without = partita.plan("gpt-13b", gpu=machine_named("v100-32", host_memory=0, disk=0))
    assert without.best is None
    with pytest.raises(ConfigError, match="does not fit on 1 x v100-32.*\n.*GPU has .* GB, .* GB needed"):
        without.config()


LONG = "family=llama,layers=16,hidden=1024,heads=8,vocab=1000"


@pytest.mark.thorough
def test_long_samples_are_shared_by_the_ranks_of_a_node() -> None:
    """If a sample does not fit on a rank, the ranks of a node slice it.

    The simulated engine with this config has the predicted activations, and sends the predicted bytes.
    """
    small = replace(machine_named("a100-40"), memory=20e9)
    found = partita.plan(LONG, gpus=4, gpu=small, tokens=262144, samples=4)
    best = found.best
    assert best is not None
    assert best.settings.mesh.sequence > 1
    assert all(each.fits_without_activations or each.fits for each in found.forecasts)
    whole = [each for each in found.forecasts if each.settings.mesh.sequence == 1]
    assert not any(each.fits for each in whole if each.settings.mesh.data == 4)
    assert all(best.rank <= each.rank for each in whole)
    assert found.config()["parallel"]["sequence"] == best.settings.mesh.sequence
    assert best.sent is not None
    source = found.source
    simulated_model = SimulatedModel(
        lambda: read_source(LONG, 262144).model, lambda samples: source.batch(samples, "meta")
    )
    ranks = simulate(simulated_model, found.config(), Cluster(4, "cuda", 4)).ranks
    for rank in ranks:
        assert rank.activation_bytes == pytest.approx(best.held["activations", "device"], rel=0.02)
        sent = sum(count.sent_bytes for key, count in rank.traffic.rows.items() if key.axes == ("sequence",))
        assert sent == pytest.approx(best.sent["sequence"], rel=1e-6)


def test_short_samples_stay_whole() -> None:
    choices = [each.settings for each in partita.plan(SMALL, gpus=4, gpu="h100").forecasts]
    assert {settings.mesh.sequence for settings in choices} == {1}
    assert {settings.inputs for settings in choices} == {"none"}


@pytest.mark.thorough
def test_samples_too_few_for_the_ranks_are_cut() -> None:
    choices = [each.settings for each in partita.plan(SMALL, gpus=4, gpu="h100", samples=2).forecasts]
    assert {settings.mesh.sequence for settings in choices} >= {1, 2}


@pytest.mark.thorough
def test_inputs_go_to_the_host_where_nothing_fits_without() -> None:
    """Inputs are offloaded to the host if nothing fits without that, on one GPU, which cannot slice samples."""
    sizes, tokens = "family=llama,layers=48,hidden=1024,heads=8,vocab=1000", 131072
    found = partita.plan(sizes, gpu="rtx-4090", tokens=tokens, samples=2)
    best, on_device = found.best, [each for each in found.forecasts if each.by_tier.keys() == {Tier.DEVICE}]
    assert best is not None
    assert on_device
    assert not any(each.fits for each in on_device)
    assert best.settings.sections()["activations"] == {"checkpoint": "units", "offload": "host"}
    source = read_source(sizes, tokens)
    simulated_model = SimulatedModel(
        lambda: read_source(sizes, tokens).model, lambda samples: source.batch(samples, "meta")
    )
    config = {
        **best.settings.sections(),
        "precision": {**best.settings.sections().get("precision", {}), "compute": "bf16"},
    }
    (rank,) = simulate(simulated_model, config, Cluster(1, "cuda", 1)).ranks
    assert rank.memory.peak["activations", "host"] == best.held["activations", "host"]
    assert rank.activation_bytes == pytest.approx(best.held["activations", "device"], rel=0.02)


@pytest.mark.parametrize("communication", [{"gradients": "int8"}, {"gradients": "int4", "parameters": "int8"}])
def test_quantized_plans_send_what_their_config_sends(communication: dict[str, str]) -> None:
    source = read_source(SMALL)
    search = Search(source, replace(machine_named("h100"), gpus=2), 4, 8)
    settings = CommunicationSettings("quantized", communication_keys=tuple(communication.items()))
    states = StateSettings(2, precision=StatePrecision("half", (("gradients", "bf16"),)), communication=settings)
    planned = PlanSettings(MeshShape(data=4), states, micro=2, accumulate=1, checkpoint="none")
    config = {**planned.sections(), "precision": {"gradients": "bf16", "compute": "bf16"}}
    estimate = estimate_config(source, config, 4, "cuda", 2)
    (stage,) = estimate.stages
    assert sum(search.forecast(planned).sent.values()) == sum(estimate.sent(stage).values())


def test_codes_are_weighed_where_they_are_asked_for(tmp_path: Path) -> None:
    """With ``compress``, plans for a slow network use quantized collectives.

    The simulated engine sends the predicted bytes inside and between nodes, and the trace has the predicted step time.
    """
    slow = replace(machine_named("h100"), gpus=2, network=2e8)
    sizes = "family=llama,layers=4,hidden=1024,heads=8,vocab=1000"
    full, coded = (
        partita.plan(sizes, gpus=4, gpu=slow, tokens=512, samples=8, compress=compress) for compress in (False, True)
    )
    assert not any(each.settings.states.communication.communication_keys for each in full.forecasts)
    best, slower = coded.best, full.best
    assert best is not None
    assert slower is not None
    assert best.time is not None
    assert slower.time is not None
    assert best.time.total_s < (1 - MIN_GAIN) * slower.time.total_s
    assert coded.config()["communication"] == dict(best.settings.states.communication.communication_keys)
    simulated_model = SimulatedModel(
        lambda: read_source(sizes, 512).model, lambda samples: coded.source.batch(samples, "meta")
    )
    for rank in simulate(simulated_model, coded.config(), Cluster(4, "cuda", 2)).ranks:
        sent = Counter[str]()
        for key, count in rank.traffic.rows.items():
            sent[",".join(key.axes)] += count.sent_bytes * (key.purpose != "control")
        assert best.sent is not None
        assert {axes for axes, num in sent.items() if num} >= {"node", "local"}
        # The prediction includes control messages of a few bytes each.
        assert {axes: pytest.approx(num, abs=1000) for axes, num in best.sent.items()} == sent
    coded.write_trace(tmp_path / "step.trace.json")
    events = json.loads((tmp_path / "step.trace.json").read_text())["traceEvents"]
    assert best.settings.accumulate == 1
    assert max(event["ts"] + event["dur"] for event in events if "dur" in event) == pytest.approx(
        1e6 * best.time.total_s, rel=0.01
    )


@pytest.mark.thorough
def test_figures_of_nodes_and_codes_are_options() -> None:
    """Figures of the machine are options, whose value follows a space or an equals sign; so is ``--compress``."""
    options = ["--network=1.25GB", "--disk", "2TB", "--host-memory", "64GiB", "--compress", "--json", "-"]
    result = run(app, ["plan", SMALL, "--gpus", "16", *options])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    figures = {name: found["machine"][name] for name in ("network", "disk", "host_memory")}
    assert figures == {"network": 1.25e9, "disk": 2e12, "host_memory": 64 * 2**30}
    assert any("sent" in each["way"] for each in found["plans"])
    for wrong in (["--network", "fast"], ["--network=fast"]):
        refused = run(app, ["plan", SMALL, *wrong])
        assert refused.exit_code != 0
        assert "--network: expected bytes such as 128GiB or 1.5TB; got 'fast'" in refused.output


def test_batches_of_one_s_own_are_made_for_any_number_of_samples(tmp_path: Path) -> None:
    """The user's sample batch is expanded to any number of samples, also in nested containers."""
    (tmp_path / "own.py").write_text(
        "import torch\n"
        "class Own(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))\n"
        "    def forward(self, x, more):\n"
        "        for layer in self.layers:\n"
        "            x = layer(x) + more['y'][0]\n"
        "        return x.sum()\n"
        "def build():\n"
        "    return Own(), {'x': torch.zeros(1, 8), 'more': {'y': [torch.zeros(1, 8)]}}\n"
    )
    source = read_source(f"{tmp_path / 'own.py'}:build")
    batch = source.batch(6, "meta")
    assert batch["x"].shape == batch["more"]["y"][0].shape == (6, 8)
    found = partita.plan(source, gpus=2, gpu="h100", samples=8)
    assert found.best is not None


@pytest.mark.thorough
def test_gathers_stay_within_nodes_where_that_is_faster() -> None:
    """All-gathers of stage 3 for backward stay inside nodes if that is faster. It is lossless, and takes memory."""
    slow = replace(machine_named("h100"), gpus=4, network=1e10, memory=2e10)
    found = partita.plan("family=llama,layers=8,hidden=2048,heads=16,vocab=1000", gpus=8, gpu=slow, tokens=512)
    (hierarchical, *_) = [each for each in found.forecasts if each.settings.states.communication is HIERARCHICAL]
    settings = hierarchical.settings
    flat = replace(
        settings,
        mesh=replace(settings.mesh, node=1),
        states=replace(settings.states, communication=STAGE_DEFAULT),
    )
    (other,) = [each for each in found.forecasts if each.settings == flat]
    assert hierarchical.time is not None
    assert other.time is not None
    assert hierarchical.time.total_s < other.time.total_s
    assert hierarchical.by_tier[Tier.DEVICE] > other.by_tier[Tier.DEVICE]
    assert settings.sections()["zero"] == {"stage": 3, "hierarchical": True}
    on_one_node = partita.plan(SMALL, gpus=4, gpu="h100", compress=True)
    assert not any(each.settings.states.communication.zero_keys for each in on_one_node.forecasts)


@pytest.mark.thorough
def test_more_memory_is_never_slower() -> None:
    times = []
    for gpu in ("a100-40", "a100-80"):
        best = partita.plan("layers=24,hidden=2048", gpus=2, gpu=gpu, samples=32).best
        assert best is not None
        assert best.time is not None
        times.append(best.time.total_s)
    assert times[1] <= times[0]


def test_every_preset_has_the_size_of_its_name_and_a_source() -> None:
    for name, shape in presets().items():
        assert shape["from"]
        text = name.rpartition("-")[2]
        size = float(text[:-1]) * {"b": 1e9, "t": 1e12}[text[-1]]
        tolerance = 0.25 if size < 4e9 else 0.07  # names of small models do not count their embeddings
        assert read_source(name).num_params == pytest.approx(size, rel=tolerance), name


def test_machines_say_where_their_figures_are_from() -> None:
    assert all(machine.source for machine in machines().values())


def test_a_folder_s_config_is_a_model(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, intermediate_size=96, vocab_size=300, max_position_embeddings=64)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    source = read_source(str(tmp_path))
    assert source.context == 64
    assert all(param.is_meta for param in source.model.parameters())
    with pytest.raises(ConfigError, match="--tokens: 65 are more than the 64 positions"):
        read_source(str(tmp_path), tokens=65)


def own() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    layers = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(64, 8)), (torch.zeros(2, 64),)


def no_batch() -> nn.Module:
    return nn.Linear(2, 2)


def test_code_of_the_user_s_is_a_model_and_its_plan_trains_here() -> None:
    found = partita.plan(f"{__name__}:own", gpu="rtx-4090")
    config = found.config()
    del config["precision"]["compute"]  # this machine has another device
    model, (x,) = own()
    with partita.initialize(model.to_empty(device="cpu"), config) as engine:
        engine.backward(engine(x).square().sum())
        assert engine.blueprint.resolved.batch.micro == found.config()["batch"]["micro"]


def test_the_predicted_step_is_a_timeline(tmp_path: Path) -> None:
    """In the trace, each resource does one job at a time, all work of a unit occurs, and the end is the step time."""
    file = tmp_path / "step.trace.json"
    result = run(app, ["plan", SMALL, "--gpus", "4", "--out", str(file), "--json", str(tmp_path / "plan.json")])
    assert result.exit_code == 0, result.output
    best = json.loads((tmp_path / "plan.json").read_text())["plans"][0]
    events = json.loads(file.read_text())["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    done = [event for event in events if event["ph"] == "X"]
    for lane in lanes:
        of_lane = sorted((event["ts"], event["dur"]) for event in done if event["tid"] == lane)
        assert all(a + dur <= b + 0.01 for (a, dur), (b, _) in itertools.pairwise(of_lane))
    assert lanes[0] == "device"
    assert {event["cat"] for event in done} >= {"forward", "backward", "update", "reduce"}
    assert sum(event["name"] == "forward blocks.5" for event in done) == min(3, best["accumulate"])
    assert best["accumulate"] <= 3  # so all micro-batches are shown
    ends = max(event["ts"] + event["dur"] for event in done)
    assert ends == pytest.approx(1e6 * best["step_s"], rel=0.05)  # the search scales one trace to the number of samples


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lama-3-8b"], "did you mean llama-3-8b"),
        (["layers=4"], "hidden=.. is missing"),
        (["layers=4,hidden=-1"], "'hidden=-1' is not understood"),
        (["layers=4,hidden=100,heads=7"], "cannot be divided over heads=7"),
        ([SMALL, "--gpus", "0"], "at least 1 GPU; got 0"),
        ([SMALL, "--gpu", "h1000"], "there is no machine 'h1000'; did you mean h100"),
        ([SMALL, "--host-memory", "much"], "--host-memory: expected bytes such as 128GiB"),
        ([SMALL, "--host-memory", "-1GB"], "--host-memory: expected bytes such as 128GiB"),
        ([SMALL, "--network", "0"], "network: expected more than 0; got 0"),
        ([SMALL, "--tokens", "0"], "--tokens: expected at least 1"),
        ([SMALL, "--json", "no/such/folder/plan.json"], "cannot be written"),
        ([SMALL, "--out", "no/such/folder/plan.yaml"], "cannot be written"),
        ([SMALL, "--out", "plan.txt"], "--out plan.txt: expected a name that ends in .yaml"),
        ([f"{__name__}:no_batch"], "expected (model, batch)"),
        ([f"{__name__}:nothing"], "has no function 'nothing'"),
        (["no.such.module:model"], "cannot be imported"),
        ([f"{__name__}:own", "--tokens", "8"], "leave the option out"),
    ],
)
def test_bad_input_is_one_message(arguments: list[str], message: str) -> None:
    result = run(app, ["plan", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr.replace("\n", "")


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", SMALL, "--out", "mine.yaml"],
        ["plan", SMALL, "--json", "mine.yaml"],
        ["tune", SMALL, "--out", "mine.yaml"],
        ["machine", "--out", "mine.yaml"],
        ["simulate", "config.yaml", "--model", SMALL, "--world", "2", "--json", "mine.yaml"],
        ["simulate", "config.yaml", "--model", SMALL, "--world", "2", "--trace", "mine.trace.json"],
        ["convert", "config", "ds_config.json", "--out", "mine.yaml"],
    ],
)
def test_no_file_is_replaced_unasked(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = Path(arguments[-1])
    file.write_text("mine: 1\n")
    Path("config.yaml").write_text("{}")
    Path("ds_config.json").write_text("{}")
    refused = run(app, arguments)
    assert refused.exit_code == 2, refused.output
    assert f"'{file}' exists already; pass --overwrite to replace it" in " ".join(refused.stderr.split())
    assert file.read_text() == "mine: 1\n"


@pytest.mark.parametrize("option", ["--out", "--json"])
def test_a_file_is_replaced_by_overwrite(option: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("mine: 1\n")
    assert run(app, ["plan", SMALL, option, str(file), "--overwrite"]).exit_code == 0
    assert "mine" not in file.read_text()


def test_the_command_shows_and_writes(tmp_path: Path) -> None:
    out, figures = tmp_path / "config.yaml", tmp_path / "plan.json"
    result = run(app, ["plan", SMALL, "--gpus", "2", "--out", str(out), "--json", str(figures)])
    assert result.exit_code == 0, result.output
    shown = " ".join(result.output.split())
    assert "2 x h100" in shown
    assert "activations" in shown
    data = json.loads(figures.read_text())
    assert yaml.safe_load(out.read_text()) == data["config"]
    best = data["plans"][0]
    assert best["fits"]
    assert best["step_s"] > 0
    result = run(app, ["plan", "gpt-1t", "--gpu", "rtx-4090"])
    assert result.exit_code == 1
    assert "does not fit" in result.stderr
