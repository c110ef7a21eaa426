"""``partita simulate``: a repeated series of calls is shown once without losing calls, and the command's output."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from partita.cli.main import app
from partita.prediction.simulate.rank import Collective
from partita.prediction.simulate.summary import sequence
from partita.table.traffic import TrafficKey


def calls(text: str) -> list[Collective]:
    return [Collective(TrafficKey("all_gather", ("data",), letter), 1) for letter in text]


def compressed(text: str) -> list[tuple[int, str]]:
    found = list(sequence(calls(text)))
    assert [call for times, cycle in found for call in times * cycle] == calls(text)
    return [(times, "".join(call.key.purpose for call in cycle)) for times, cycle in found]


def test_cycles_are_told_once() -> None:
    assert compressed("") == []
    assert compressed("abc") == [(1, "a"), (1, "b"), (1, "c")]
    assert compressed("aaaab") == [(4, "a"), (1, "b")]
    assert compressed("xababababy") == [(1, "x"), (4, "ab"), (1, "y")]
    assert compressed("rabrabrabr") == [(3, "rab"), (1, "r")]


def test_the_command_shows_and_writes_what_each_role_holds(tmp_path: Path) -> None:
    config, figures = tmp_path / "config.yaml", tmp_path / "figures.json"
    config.write_text("{zero: {stage: 3}, batch: {micro: 2}}")
    asked = ["simulate", str(config), "--model", "layers=2,hidden=64,vocab=96,context=16", "--world", "16"]
    result = CliRunner().invoke(app, [*asked, "--json", str(figures)])
    assert result.exit_code == 0, result.output
    assert "data 15" in result.output
    assert "reduce_scatter" in result.output
    found = json.loads(figures.read_text())
    assert found["mesh"] == {"pipeline": 1, "data": 16, "sequence": 1, "tensor": 1}
    assert [rank["rank"] for rank in found["ranks"]] == [0, 15]
    for rank in found["ranks"]:
        assert rank["bytes"]["device"] > rank["activation_bytes"] > 0
        assert sum(row["sent_bytes"] for row in rank["traffic"]) == sum(
            call["sent_bytes"] for call in rank["collectives"]
        )


def test_wrong_words_are_told(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("{}")
    sizes = "layers=1,hidden=64,vocab=96,context=16"
    for words, message in (
        (["--model", "nothing", "--world", "2"], "model 'nothing'"),
        (["--model", sizes, "--world", "2", "--rank", "7"], "rank 7 is outside the mesh of 2 ranks"),
        (["--model", sizes, "--world", "2", "--device", "abacus"], "expected a device type of PyTorch"),
        (["--model", sizes, "--world", "2", "--json", str(tmp_path / "no" / "file")], "name another file"),
    ):
        result = CliRunner().invoke(app, ["simulate", str(config), *words])
        assert result.exit_code == 2, result.output
        assert message in " ".join(result.output.split()), result.output


def test_a_trace_has_the_predicted_step_and_each_call_in_its_order(tmp_path: Path) -> None:
    config, trace = tmp_path / "config.yaml", tmp_path / "step.trace.json"
    config.write_text("{zero: {stage: 3}, batch: {micro: 2}}")
    asked = ["simulate", str(config), "--model", "layers=2,hidden=64,vocab=96,context=16", "--world", "16"]
    figures = tmp_path / "figures.json"
    result = CliRunner().invoke(app, [*asked, "--trace", str(trace), "--device", "h100", "--json", str(figures)])
    assert result.exit_code == 0, result.output
    events = json.loads(trace.read_text())["traceEvents"]
    titles = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert list(titles) == ["predicted, h100", "simulated collectives of rank 0 (data 0)"]
    predicted, calls = ([e for e in events if e["pid"] == pid and e["ph"] == "X"] for pid in titles.values())
    assert {"forward", "backward", "gather", "reduce", "update"} <= {event["cat"] for event in predicted}
    sent = [
        (call["collective"], call["sent_bytes"]) for call in json.loads(figures.read_text())["ranks"][0]["collectives"]
    ]
    assert [(each["cat"], int(each["name"].split()[-2])) for each in calls] == sent
    ends = [0.0, *(each["ts"] + each["dur"] for each in calls)]
    assert [each["ts"] for each in calls] == pytest.approx(ends[:-1]), "one after the other"
    large, small = (next(e for e in calls if e["cat"] == name) for name in ("reduce_scatter", "all_gather"))
    assert large["dur"] > small["dur"] > 0, "by the bytes of each"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--trace", "step.json"], "expected a name that ends in"),
        (["--trace=step.json"], "expected a name that ends in"),
        (["--trace", "step.trace.json", "--device", "cpu"], "--device cpu is not a machine"),
        (["--trace", "none/step.trace.json"], "cannot be written"),
        (["--device", "h1000.yaml"], "cannot be read"),
    ],
)
def test_a_trace_that_cannot_be(more: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text("batch: {micro: 2}")
    asked = ["simulate", "config.yaml", "--model", "layers=2,hidden=64,vocab=96,context=16", "--world", "2", *more]
    result = CliRunner().invoke(app, asked, env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert message in result.output
