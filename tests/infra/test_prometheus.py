"""Rules, alerts and dashboards, as far as they can be checked without a deployment."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from infra import dashboards, vllm_names
from tests.support.deployment.processes import ROOT
from tests.support.pages import commands

PROMETHEUS = ROOT / "infra" / "prometheus"
DEPLOYMENT = ROOT / "docs" / "deployment" / "index.md"
RUNBOOKS = (ROOT / "docs" / "runbooks.md").read_text()
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="Prometheus is not installed"
)


def promtool(*args: str) -> None:
    done = subprocess.run(
        ["promtool", *args], cwd=PROMETHEUS, text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_the_rules_are_valid() -> None:
    promtool("check", "rules", "alerts.rules.yml", "vllm.rules.yml")


@needs_promtool
def test_alerts_fire_when_they_should_and_not_otherwise() -> None:
    promtool("test", "rules", "alerts_test.yml")


@needs_promtool
def test_the_configuration_is_valid() -> None:
    promtool("check", "config", "--syntax-only", "prometheus.yml")


def test_every_alert_has_a_runbook() -> None:
    text = (PROMETHEUS / "alerts.rules.yml").read_text()
    rules = [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]
    alerts = [rule for rule in rules if "alert" in rule]

    assert re.findall(r"^## (\w+)$", RUNBOOKS, re.MULTILINE) == [rule["alert"] for rule in alerts]
    for rule in alerts:
        page = "https://warren.example/docs/runbooks.html"
        assert rule["annotations"]["runbook_url"] == f"{page}#{rule['alert'].lower()}"


def test_the_command_of_the_docs_enters_the_address_of_the_runbooks(tmp_path: Path) -> None:
    (command,) = (one for one in commands(DEPLOYMENT) if one.startswith("sed "))
    copy = tmp_path / "infra/prometheus/alerts.rules.yml"
    copy.parent.mkdir(parents=True)
    copy.write_text(text := (PROMETHEUS / copy.name).read_text())

    subprocess.run(shlex.split(command), cwd=tmp_path, check=True)

    links = [line.split()[1] for line in text.splitlines() if "runbook_url:" in line]
    pages = [link.removeprefix("https://warren.example/docs") for link in links]
    assert len(links) > 1
    for page in pages:
        assert f"runbook_url: https://docs.example/warren{page}\n" in copy.read_text()


def test_the_dashboards_are_those_of_the_code() -> None:
    assert {path: path.read_text() for path in dashboards.rendered()} == dashboards.rendered()


def test_the_rules_with_vllms_names_are_those_of_the_code() -> None:
    assert {path.read_text() for path in vllm_names.FILES} == {vllm_names.rendered()}
