"""What runs when: noxfile.py, .ci/run, the workflows and CONTRIBUTING.md agree."""

import re

import pytest
from installed import ROOT

if not (ROOT / ".ci").exists():
    pytest.skip("other versions are tested without .ci", allow_module_level=True)
NOX = (ROOT / "noxfile.py").read_text()
RUN = (ROOT / ".ci" / "run").read_text()
WORKFLOWS = {path.stem: path.read_text() for path in (ROOT / ".github").rglob("*.yml")}


def paths(text):
    """Returns the files and folders of tests that a text names."""
    return set(re.findall(r"\btests/[\w/]+(?:\.py)?\b", text))


def test_what_is_run_is_there():
    """Pytest ends with an error where it is given no file, or one without a test."""
    for path in paths(NOX) | paths(RUN) | paths("".join(WORKFLOWS.values())):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"lossscale/\w+/\w+\.py", NOX):
        assert (ROOT / path).exists(), path


def test_the_workflows_run_what_ci_does():
    halves = {"tests/optimizer"}  # what `.ci/run` runs beside the rest
    assert paths(RUN) - halves == paths(WORKFLOWS["tests"])
    assert "nox --list-sessions --json -t weekly" in WORKFLOWS["weekly"]
    for command in ('pytest -q -m "other_keras or each_version"', "git diff --quiet"):
        assert command in RUN
        assert command.replace(" -q", "") in WORKFLOWS["tests"].replace(" -q", "")


def test_the_table_of_what_runs_when_names_each_session():
    table = (ROOT / "CONTRIBUTING.md").read_text()
    for name in re.findall(r"(?m)^def ([a-z]\w*)\(session: nox", NOX):
        assert f"nox -s {name}`" in table or f"`{name}`" in table, name
