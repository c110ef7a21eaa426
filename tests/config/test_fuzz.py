"""Reading any file or mapping ends in a configuration or in a ConfigError."""

import copy
import json
import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from partita.config.load import load_config
from partita.config.resolve import Resolved, describe, resolve
from partita.config.schema import Config
from partita.errors import ConfigError

SEED = 20240607
NUM_CASES = 5_000
MAX_CHARS = 4_000

VALID: tuple[dict[str, object], ...] = (
    {},
    Config().model_dump(mode="json"),
    {"zero": {"stage": 3, "prefetch_bytes": "64MiB", "units": ["Block", "model.layers.*"]}, "batch": {"micro": 2}},
    {"precision": {"compute": "fp16", "loss_scale": 1024, "keep_fp32": ["LayerNorm"]}, "clip_grad_norm": 1.0},
    {"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}, "schedule": {"name": "cosine", "total_steps": 100}},
    {"batch": {"total": 24, "accumulate": 1}, "parallel": {"data": "auto"}, "communication": {"buffers": "local"}},
)
TOKENS = (
    "&a ", "*a", "<<: *a\n", "<<: [*a, *a]\n", "!!binary ", "!!int ", "!!bool x", "!!set ", "!!python/object:os.a ",
    "? ", "- ", "---\n", "...", "%YAML 9.9\n", "[", "{", "]", "}", "[" * 400, "{a: " * 400, "- " * 400, "\t", "\r",
    "\n", "\n  ", ": ", "|", ">", "'", '"', "#", "=", "~", "null", "true", "1e999", "-.inf", ".nan", "0x_", "0b",
    "2001-13-45", "1:99:99", "9" * 5000, "0x" + "f" * 5000, "NaN", "Infinity", "\0", "\ufeff", "\u2028", "\\ud800", "é",
    "\U0001f600", "zero", "stage", '"zero": ',
)  # fmt: skip
ODD_VALUES: tuple[object, ...] = (
    None, True, False, 0, 1, -1, 3, 7, 2**31, 10**30, 10**5000, 0.5, -0.0, 1e300, math.nan, math.inf, "", "auto",
    "none", "1e-3", "1e3", "8", "64MiB", "1e400kb", "..b", "\0", "\ud800", "x" * 5000, b"\xff", (), [], {}, [[]],
    {"a": 1}, [None], {None: 1}, {1: {2: 3}}, {"stage": 3}, object(), Ellipsis, {1, 2}, 1j, "host", "fp16", "bf16",
    "dynamic", ["Block"], [0.9, 0.95], Path("somewhere"),
)  # fmt: skip
ODD_KEYS: tuple[object, ...] = (
    "",
    "stage",
    "zero",
    "Zero",
    "lr",
    "self",
    "__class__",
    "model_config",
    "a.b",
    "\ud800",
    3,
    None,
)


def sections_in(data: dict[object, object]) -> list[dict[object, object]]:
    inner = [section for value in data.values() if isinstance(value, dict) for section in sections_in(value)]
    return [data, *inner]


def mutated_data(rng: random.Random) -> dict[object, object]:
    """A valid mapping with values replaced, keys renamed, added or dropped, or nested into each other."""
    data: dict[object, object] = copy.deepcopy(dict(rng.choice(VALID)))
    for _ in range(rng.randint(0, 3)):
        section = rng.choice(sections_in(data))
        key = rng.choice([*section, "zero"])
        match rng.randrange(5):
            case 0:
                section[key] = copy.deepcopy(rng.choice(ODD_VALUES))
            case 1 if key in section:
                section[rng.choice(ODD_KEYS)] = section.pop(key)
            case 2:
                section[key] = copy.deepcopy(rng.choice(VALID))
            case 3:
                section.pop(key, None)
            case _:
                for _ in range(rng.choice((1, 3, 40))):
                    section[key] = {rng.choice(("stage", "zero", "offload")): section.get(key)}
    return data


def mutated_text(rng: random.Random, text: str) -> bytes:
    """The text with pieces deleted, repeated, swapped, replaced by odd tokens, and bytes changed."""
    for _ in range(rng.randint(0, 4)):
        start = rng.randrange(len(text) + 1)
        stop = min(len(text), start + rng.choice((0, 1, 1, 4, 30)))
        piece = rng.choice(("", rng.choice(TOKENS), text[start:stop] * 2, text[start:stop][::-1]))
        text = (text[:start] + piece + text[stop:])[: 3 * MAX_CHARS]
    content = bytearray(text.encode("utf-8", "surrogatepass"))
    for _ in range(rng.choice((0, 0, 0, 1, 3))):
        if content:
            content[rng.randrange(len(content))] = rng.randrange(256)
    return bytes(content)


def from_mapping(rng: random.Random, folder: Path) -> object:
    return mutated_data(rng)


def from_yaml(rng: random.Random, folder: Path) -> object:
    path = folder / "config.yaml"
    text = yaml.safe_dump(rng.choice(VALID), default_flow_style=rng.choice((False, None)), sort_keys=False)
    path.write_bytes(mutated_text(rng, text))
    return path


def from_json(rng: random.Random, folder: Path) -> object:
    path = folder / "config.json"
    path.write_bytes(mutated_text(rng, json.dumps(rng.choice(VALID), indent=rng.choice((None, 1)))))
    return path


def overrides(rng: random.Random) -> list[str]:
    if rng.random() < 0.8:
        return []
    key = rng.choice(
        ("zero.stage", "zero", "zero.offload.path", "a.b.c", "", "clip_grad_norm", "clip_grad_norm.x", "batch.micro")
    )
    return [f"{key}{rng.choice(('=', '', '=='))}{rng.choice((*TOKENS, '3', '1e-3'))}"]


@pytest.mark.parametrize(("make_source", "share"), [(from_mapping, 0.4), (from_yaml, 0.4), (from_json, 0.2)])
def test_ends_in_a_config_or_a_config_error(
    make_source: Callable[[random.Random, Path], object], share: float, tmp_path: Path
) -> None:
    messages: list[str] = []
    num_cases = int(NUM_CASES * share)
    for case in range(num_cases):
        seed = f"{SEED}-{make_source.__name__}-{case}"
        rng = random.Random(seed)
        source = make_source(rng, tmp_path)
        try:
            resolved = resolve(
                load_config(source, overrides(rng)), rng.choice((1, 2, 3, 8)), rng.choice(("cpu", "cuda"))
            )
            assert isinstance(resolved, Resolved)
            assert load_config(resolved.config.model_dump(mode="json")) == resolved.config
            assert len(describe(resolved).splitlines()) <= 10
        except ConfigError as error:
            messages.append(str(error))
        except BaseException as error:
            content = source.read_bytes() if isinstance(source, Path) else source
            pytest.fail(f"seed {seed!r}: {type(error).__name__}: {str(error)[:500]} from {repr(content)[:2000]}")
    assert all(10 < len(message) < 10_000 for message in messages)
    assert 0.2 < len(messages) / num_cases < 0.9, f"{len(messages)} of {num_cases} are wrong: this proves little"
