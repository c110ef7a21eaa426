"""Tests of release metadata: one version everywhere, tested version bounds, and workflows that call the Makefile."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

import partita

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE = (ROOT / "Makefile").read_text()
ISSUE_TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_the_version_is_the_same_everywhere() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    (newest, *_) = re.findall(r"^## \[(\d[^\]]*)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert {PROJECT["version"], partita.__version__, citation["version"], newest} == {PROJECT["version"]}


def requirements() -> dict[str, Requirement]:
    texts = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["hf"]]
    return {found.name: found for found in map(Requirement, texts)}


def versions(name: str) -> dict[str, Requirement]:
    """Return the requirements that ``make test-versions`` installs, from the Makefile's variable ``name``."""
    (line,) = re.findall(rf"^{name} \?= (.*)$", MAKEFILE, re.MULTILINE)
    return {found.name: found for found in map(Requirement, line.split())}


@pytest.mark.parametrize("name", ["torch", "transformers"])
def test_bounds_are_those_that_are_tested(name: str) -> None:
    admitted = requirements()[name].specifier
    lower = [Version(each.version) for each in admitted if each.operator == ">="]
    upper = [Version(each.version) for each in admitted if each.operator == "<"]
    assert (len(lower), len(upper)) == (1, 1), f"{name} needs one lower and one upper bound: {admitted}"
    (oldest,) = versions("OLDEST")[name].specifier
    assert Version(oldest.version).release[:2] == lower[0].release[:2]
    (newest,) = versions("NEWEST")[name].specifier
    if newest.operator == "==":
        assert admitted.contains(newest.version)
        assert not admitted.contains(f"{Version(newest.version).major}.{Version(newest.version).minor + 1}.0")
    else:
        assert str(newest) == f"<{upper[0]}"


def test_the_torch_of_make_test_is_admitted() -> None:
    (text,) = re.findall(r"^TORCH \?= (.*)$", MAKEFILE, re.MULTILINE)
    (version,) = Requirement(text).specifier
    assert requirements()["torch"].specifier.contains(version.version)


def run_lines(workflow: Path) -> Iterator[str]:
    for job in yaml.safe_load(workflow.read_text())["jobs"].values():
        for step in job["steps"]:
            if "run" in step:
                yield step["run"]


def test_workflows_call_the_makefile() -> None:
    called = [line for workflow in WORKFLOWS for line in run_lines(workflow)]
    targets = {line.split()[1] for line in called if line.split()[0] == "make"}
    assert all(line.split()[0] == "make" for line in called), called
    assert {"lint", "test", "docs", "wheels", "test-versions"} <= targets
    known = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
    assert targets <= known


def test_workflows_may_only_read() -> None:
    for workflow in WORKFLOWS:
        content = yaml.safe_load(workflow.read_text())
        assert content["permissions"] == {"contents": "read"}, workflow.name
        for name, job in content["jobs"].items():
            assert job.get("permissions", {}) in ({}, {"id-token": "write"}), f"{workflow.name}: {name}"
            assert "timeout-minutes" in job or "environment" in job, f"{workflow.name}: {name}"


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.name
)
def test_issue_templates_are_forms(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    if path.name == "config.yml":
        assert all({"name", "url", "about"} == link.keys() for link in form["contact_links"])
        return
    assert {"name", "description", "body"} <= form.keys()
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in fields}) == len(fields)
    assert all(field["attributes"]["label"] for field in fields)


def test_the_documents_that_a_project_has_are_linked() -> None:
    readme = (ROOT / "README.md").read_text()
    for name in ("CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md", "CHANGELOG.md", "CITATION.cff"):
        assert (ROOT / name).is_file()
        assert f"({name})" in readme, name
    assert "(RELEASING.md)" in (ROOT / "CONTRIBUTING.md").read_text()
