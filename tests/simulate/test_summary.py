"""What repeats itself in a sequence of calls is said once, and nothing is lost."""

import json
from pathlib import Path

from typer.testing import CliRunner

from partita.cli.main import app
from partita.plan.traffic import TrafficKey
from partita.simulate.rank import Collective
from partita.simulate.summary import sequence


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
        (["--model", sizes, "--world", "2", "--device", "abacus"], "expected a kind of device"),
        (["--model", sizes, "--world", "2", "--json", str(tmp_path / "no" / "file")], "name another file"),
    ):
        result = CliRunner().invoke(app, ["simulate", str(config), *words])
        assert result.exit_code == 2, result.output
        assert message in " ".join(result.output.split()), result.output
