"""pyproject.toml names what the requirements files name."""

import tomllib

from conftest import ROOT


def requirements(name: str) -> list[str]:
    lines = (ROOT / name).read_text().splitlines()
    return [line for line in lines if line and not line.startswith(("#", "-r "))]


def test_both_lists_are_equal():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert project["dependencies"] == requirements("requirements.txt")
    assert extras["extras"] == requirements("requirements-extras.txt")
    assert extras["test"] == ["gpt-speed[extras]", *requirements("requirements-dev.txt")]
