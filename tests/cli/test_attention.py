"""``partita attention show``."""

from pathlib import Path

import pytest

from tests.cli.test_main import invoke


def test_the_picture_of_a_config(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("attention: {pattern: longformer, block: 8, window: 16, global: 1}")
    code, output = invoke("attention", "show", config, "--length", "64")
    assert code == 0
    rows = ["+.......", "#+......", "##+.....", "#+#+....", "#.+#+...", "#..+#+..", "#...+#+.", "#....+#+"]
    assert output.splitlines()[:8] == rows
    assert "longformer, causal: 64 positions in blocks of 8; a character is 1 x 1 blocks" in output
    assert f"{sum(len(row.replace('.', '')) for row in rows)} of 64 blocks are computed" in output
    code, output = invoke("attention", "show", config, "--length", "64", "--both")
    assert output.splitlines()[0] == "#" * 8


def test_long_sequences_are_drawn_in_stretches() -> None:
    said = ["--set", "attention.pattern=sliding", "--set", "attention.window=1024", "--length", "65536"]
    code, output = invoke("attention", "show", *said)
    assert code == 0
    lines = output.splitlines()
    assert len(lines[0]) == len(lines[63]) == 64
    assert lines[10] == "." * 9 + "++" + "." * 53
    assert "a character is 16 x 16 blocks" in output
    assert "30.4 times fewer than dense attention's 2147.5 million" in output


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (["attention.pattern=sliding"], "attention.window: the pattern 'sliding' needs it"),
        (["attention.pattern=user", "attention.layout=['10', '01']"], "2 x 2 blocks of 64 positions do not cover 64"),
        (["attention.windows=3"], "attention.windows: unknown key; did you mean attention.window?"),
        (
            ["attention.pattern=sliding", "attention.window=9", "attention.random=1"],
            "attention.random: the pattern 'sliding'",
        ),
    ],
)
def test_mistakes_are_one_message(said: list[str], message: str) -> None:
    code, output = invoke("attention", "show", *(word for text in said for word in ("--set", text)))
    assert code == 2
    assert message in output
