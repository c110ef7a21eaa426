"""Strict reading of files, and overrides."""

from collections import OrderedDict
from pathlib import Path
from types import MappingProxyType

import pytest
import yaml

from partita.config import plain_values
from partita.config.load import load_config, read_sections
from partita.config.plain_values import parse_yaml
from partita.config.schema import Config
from partita.errors import ConfigError


def written(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.yaml", "zero:\n  stage: 3\nclip_grad_norm: 1e-1\n"),
        ("a.yml", "{zero: {stage: 3}, clip_grad_norm: 0.1}"),
        ("a.YAML", '"zero": {"stage": "3"}\n"clip_grad_norm": 1.0e-1'),
        ("a.json", '{"zero": {"stage": 3}, "clip_grad_norm": 0.1}'),
        ("bom.json", b'\xef\xbb\xbf{"zero": {"stage": 3}, "clip_grad_norm": 0.1}'),
        ("merge.yaml", "zero: &z {stage: 3}\nclip_grad_norm: 0.1\nbatch: {<<: {micro: auto}}\n"),
        ("alias.yaml", "clip_grad_norm: &n 0.1\noptimizer: {weight_decay: 0.01}\nzero: {<<: [{stage: 1}], stage: 3}\n"),
    ],
)
def test_files(name: str, content: str | bytes, tmp_path: Path) -> None:
    path = written(tmp_path, name, content)
    expected = Config(zero={"stage": 3}, clip_grad_norm=0.1)
    assert load_config(path) == expected
    assert load_config(str(path)) == expected


@pytest.mark.parametrize("content", ["", "\n\n", "# nothing\n", "---\n", "~", "{}"])
def test_an_empty_yaml_file_is_all_defaults(content: str, tmp_path: Path) -> None:
    assert load_config(written(tmp_path, "a.yaml", content)) == Config()


@pytest.mark.parametrize("content", ["", " \n", "null", "{}"])
def test_an_empty_json_file_is_all_defaults(content: str, tmp_path: Path) -> None:
    assert load_config(written(tmp_path, "a.json", content)) == Config()


def test_merge_precedence_is_that_of_yaml() -> None:
    content = "a: &a {x: 1, y: 1}\nb: &b {x: 2, z: 2}\nc: {<<: [*a, *b], y: 3}\nd: {y: 4, <<: *a}\n"
    assert parse_yaml(content, "text")[0] == {
        "a": {"x": 1, "y": 1},
        "b": {"x": 2, "z": 2},
        "c": {"x": 1, "y": 3, "z": 2},
        "d": {"x": 1, "y": 4},
    }


@pytest.mark.parametrize(
    "source", [OrderedDict(zero={"stage": 2}), MappingProxyType({"zero": MappingProxyType({"stage": 2})})]
)
def test_any_mapping(source: dict[str, object]) -> None:
    assert load_config(source).zero.stage == 2


DEEP = "nested deeper than 16 levels"
WRONG_FILES = [
    ("zero: {stage: 3}\nzero: {stage: 2}\n", "line 2: the key 'zero' is given twice; keep one of them"),
    ("zero:\n  stage: 3\n  stage: 2\n", "line 3: the key 'zero.stage' is given twice"),
    ("zero:\n  stage: 3\n stage: 2\n", "line 3: not valid YAML: "),
    ("zero: [1, 2\n", "line 2: not valid YAML: "),
    ("zero:\n\tstage: 3\n", "line 2: not valid YAML: found character"),
    ("zero:\n  stage: 9\n", "zero.stage: expected one of 0, 1, 2, 3; got 9 (from {path}, line 2)"),
    ("zero:\n\n  stag: 3\n", "zero.stag: unknown key; did you mean zero.stage? (from {path}, line 3)"),
    ("communication:\n  gradients: fp8\n", "communication.gradients: expected one of full, int8, int4"),
    ("[1, 2]", "expected sections (key: value) at the top level; got [1, 2]"),
    ("just words", "expected sections (key: value) at the top level; got 'just words'"),
    ("1: 2\n", "line 1: keys must be printable text; got the key 1 at the top level; put quotes around it"),
    ("zero:\n  yes: 2\n", "line 2: keys must be printable text; got the key true in 'zero'"),
    ("zero:\n  ? [a]\n  : 2\n", "line 2: keys must be printable text; got a list or a section as a key"),
    ("a: 1\n---\nb: 2\n", "line 2: not valid YAML: but found another document"),
    ("zero: !!python/object:os.system {}\n", "has no meaning here; remove it"),
    ("zero: !mine 3\n", "line 1: the tag '!mine' has no meaning here"),
    ("zero: !!set {a, b}\n", "has no meaning here"),
    ("zero: !!int three\n", "'three' is not a value of the kind int"),
    ("zero: !!bool maybe\n", "'maybe' is not a value of the kind bool"),
    (f"batch: {{micro: {'9' * 5000}}}\n", "is not a value of the kind int"),
    (f"batch: {{micro: 0x{'f' * 5000}}}\n", "batch.micro: expected auto or a whole number"),
    ("zero: *nothing\n", "line 1: not valid YAML: "),
    ("zero: &z {offload: *z}\n", DEEP),
    ("zero: &z {<<: *z}\n", DEEP),
    ("zero: {<<: 3}\n", "'<<' merges sections only"),
    ("[" * 100_000, DEEP),
    ("- " * 100_000 + "a", DEEP),
    ("{a: " * 100_000, DEEP),
    ("? " * 100_000, DEEP),
    (
        "a: &a0 [x]\n" + "".join(f"b{i}: &a{i + 1} [{', '.join([f'*a{i}'] * 9)}]\n" for i in range(12)),
        "more than 10000 values",
    ),
    (
        "".join(f"b{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9 if i else ['{x: 1}'])}]}}\n" for i in range(12)),
        "more than 10000",
    ),
    ("[" + "1, " * 30_000 + "1]", "more than 10000 values"),
    ("zero: \0", "not valid YAML: "),
    (b"\xff\xfe\x00zero", "is not UTF-8 text (byte 0); save it as UTF-8"),
    (b"zero: {stage: 1} # \xe9\n", "is not UTF-8 text (byte 19)"),
    (b"#" * (2**20 + 1), "is larger than 1048576 bytes; is it a configuration?"),
]
WRONG_JSON = [
    ('{"zero": {"stage": 3},\n "batch": }', "line 2: not valid JSON: Expecting value; correct this line"),
    ('{"zero": {"stage": 3, "stage": 2}}', "the key 'stage' is given twice in one section; keep one of them"),
    ('{"zero": {"stage": NaN}}', "zero.stage: expected one of 0, 1, 2, 3; got nan (from {path})"),
    ('{"optimizer": {"lr": Infinity}}', "optimizer.lr: expected a number of at least 0; got inf"),
    (f'{{"batch": {{"micro": {"9" * 5000}}}}}', "not valid JSON: Exceeds the limit"),
    ("[" * 100_000, DEEP),
    ("[" * 500 + "]" * 500, "expected sections"),
    ('{"a":' * 50 + "1" + "}" * 50, DEEP),
    ("{// no comments\n}", "line 1: not valid JSON: "),
    ("3", "expected sections (key: value) at the top level; got 3"),
    ('{"\\ud800": 1}', "keys must be printable text; got the key '\\ud800' at the top level; remove these characters"),
    (b"\xff", "is not UTF-8 text (byte 0)"),
]


@pytest.mark.parametrize("loader", [yaml.SafeLoader, getattr(yaml, "CSafeLoader", yaml.SafeLoader)])
@pytest.mark.parametrize(
    ("name", "content", "fragment"),
    [("a.yaml", *wrong) for wrong in WRONG_FILES] + [("a.json", *wrong) for wrong in WRONG_JSON],
    ids=lambda value: repr(value)[:40],
)
def test_wrong_files(
    name: str, content: str | bytes, fragment: str, loader: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain_values, "_Loader", loader)
    path = written(tmp_path, name, content)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert fragment.format(path=path) in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_folder_and_an_unreadable_file(tmp_path: Path) -> None:
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(ConfigError, match=r"folder.yaml' cannot be read: Is a directory"):
        load_config(tmp_path / "folder.yaml")
    (tmp_path / "loop.yaml").symlink_to(tmp_path / "loop.yaml")
    with pytest.raises(ConfigError, match=r"loop.yaml' cannot be read: Too many levels of symbolic links"):
        load_config(tmp_path / "loop.yaml")


def test_overrides_apply_in_order_and_are_yaml() -> None:
    config = load_config(
        {"zero": {"stage": 1, "units": ["A"]}},
        [
            "zero.stage=2",
            " zero.stage =3",
            "zero.units=[B, model.layers.*]",
            "optimizer.lr=1e-2",
            "clip_grad_norm=null",
        ],
    )
    assert (config.zero.stage, config.zero.units) == (3, ("B", "model.layers.*"))
    assert config.optimizer.lr == 0.01
    assert config.clip_grad_norm is None


def test_overrides_of_a_whole_section_replace_it() -> None:
    assert load_config({"batch": {"micro": 2}}, ["batch={total: 8}"]).batch == Config(batch={"total": 8}).batch


def test_overrides_reach_into_sections_that_are_absent_or_empty() -> None:
    assert load_config(None, ["zero.offload.gradients=none"]).zero.offload.gradients == "none"
    assert load_config({"zero": None}, ["zero.stage=0"]).zero.stage == 0


def test_overrides_leave_the_source_as_it_was() -> None:
    source = {"zero": {"stage": 1}}
    load_config(source, ["zero.stage=3"])
    assert source == {"zero": {"stage": 1}}


def test_overriding_a_config() -> None:
    config = Config(zero={"stage": 3}, batch={"micro": 2})
    assert load_config(config, ["batch.micro=4"]) == Config(zero={"stage": 3}, batch={"micro": 4})
    assert config.batch.micro == 2


@pytest.mark.parametrize(
    ("overrides", "fragment"),
    [
        (["zero.stage"], "override 'zero.stage': expected 'section.key=value', such as 'zero.stage=3'"),
        (["=3"], "override '=3': expected 'section.key=value'"),
        ([3], "override 3: expected 'section.key=value'"),
        ("zero.stage=3", "overrides: expected a list of 'section.key=value' texts; got 'zero.stage=3'"),
        (None, "overrides: expected a list of 'section.key=value' texts; got null"),
        (["zero.stage=5"], "zero.stage: expected one of 0, 1, 2, 3; got 5 (from override 'zero.stage=5')"),
        (["zero.stag=5"], "zero.stag: unknown key; did you mean zero.stage? (from override 'zero.stag=5')"),
        (["zro.stage=5"], "zro: unknown key; did you mean zero? (from override 'zro.stage=5')"),
        (["zero=3"], "zero: expected a section with the keys"),
        (["clip_grad_norm.x=3"], "'clip_grad_norm' is 1.0, not a section; set that key"),
        (["zero.stage=[1"], "override 'zero.stage=[1': not valid YAML"),
        (["zero={stage: 1, stage: 2}"], "the key 'stage' is given twice"),
        (["..=3"], "'': unknown key"),
        (["zero.stage=\ud800"], "override 'zero.stage=\\ud800': not valid YAML: "),
    ],
)
def test_wrong_overrides(overrides: list[str], fragment: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"clip_grad_norm": 1.0}, overrides)
    assert fragment in str(caught.value)


def test_sections_of_any_schema_and_where_they_were_written(tmp_path: Path) -> None:
    path = written(tmp_path, "job.yaml", "train:\n  steps: 3\nengine:\n  zero: {stage: 2}\n")
    sections, where = read_sections(path, ["engine.zero.units=[A]", "model.width=8"])
    assert sections == {
        "train": {"steps": 3},
        "engine": {"zero": {"stage": 2, "units": ["A"]}},
        "model": {"width": 8},
    }
    assert where(("train", "steps")) == f"{path}, line 2"
    assert where(("engine", "zero", "stage")) == f"{path}, line 4"
    assert where(("engine", "zero", "units", "0")) == "override 'engine.zero.units=[A]'"
    assert where(("model",)) == "override 'model.width=8'"
    assert where(("elsewhere",)) == str(path)


def test_messages_tell_files_from_overrides(tmp_path: Path) -> None:
    path = written(tmp_path, "a.yaml", "zero:\n  stage: 8\n  units: 3\nbatch: {micro: x}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["zero.stage=9"])
    message = str(caught.value)
    assert "zero.stage: expected one of 0, 1, 2, 3; got 9 (from override 'zero.stage=9')" in message
    assert f"(from {path}, line 3)" in message
    assert f"(from {path}, line 4)" in message
