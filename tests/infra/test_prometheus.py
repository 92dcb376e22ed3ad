"""Rules, alerts and dashboards, as far as they can be checked without a deployment."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra import dashboards, vllm_names
from tests.support.deployment.processes import ROOT
from tests.support.pages import blocks, commands

PROMETHEUS = ROOT / "infra" / "prometheus"
DEPLOYMENT = ROOT / "docs" / "deployment" / "index.md"
OBSERVABILITY = ROOT / "docs" / "observability.md"
RUNBOOKS = (ROOT / "docs" / "runbooks.md").read_text()
ALERTS = [
    rule
    for group in yaml.safe_load((PROMETHEUS / "alerts.rules.yml").read_text())["groups"]
    for rule in group["rules"]
    if "alert" in rule
]
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="Prometheus is not installed"
)


def promtool(*args: str, directory: Path = PROMETHEUS) -> None:
    done = subprocess.run(
        ["promtool", *args], cwd=directory, text=True, capture_output=True, check=False
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


def of_machines() -> str:
    """The documentation's configuration for processes on machines."""
    (text,) = (one.text for one in blocks(OBSERVABILITY) if one.text.startswith("global:"))
    return text


@needs_promtool
def test_the_configuration_for_machines_is_valid(tmp_path: Path) -> None:
    (tmp_path / "prometheus.yml").write_text(of_machines())
    for rules in PROMETHEUS.glob("*.rules.yml"):
        shutil.copy(rules, tmp_path)

    promtool("check", "config", "prometheus.yml", directory=tmp_path)


def test_the_configuration_for_machines_scrapes_what_compose_scrapes() -> None:
    shown, shipped = (
        yaml.safe_load(text)
        for text in (of_machines(), (PROMETHEUS / "prometheus.yml").read_text())
    )

    def kinds(configuration: dict[str, Any]) -> list[dict[str, Any]]:
        found = ("static_configs", "dns_sd_configs")
        return [
            {key: value for key, value in job.items() if key not in found}
            for job in configuration["scrape_configs"]
        ]

    assert kinds(shown) == kinds(shipped)
    assert shown["rule_files"] == [Path(path).name for path in shipped["rule_files"]]


def test_every_alert_has_a_runbook() -> None:
    assert re.findall(r"^## (\w+)$", RUNBOOKS, re.MULTILINE) == [rule["alert"] for rule in ALERTS]
    for rule in ALERTS:
        page = "https://warren.example/docs/runbooks.html"
        assert rule["annotations"]["runbook_url"] == f"{page}#{rule['alert'].lower()}"


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_a_runbook_states_the_threshold_of_its_alert(rule: dict[str, Any]) -> None:
    _, _, section = RUNBOOKS.partition(f"## {rule['alert']}\n")
    section, _, _ = section.partition("\n## ")

    stated = re.findall(r"^\*\*Threshold\.\*\* `(.+?)`, (.+?):", section, re.MULTILINE)

    assert stated == [(rule["expr"], lasting(rule.get("for")))]


def lasting(duration: str | None) -> str:
    """In words, how long an alert's condition must hold."""
    if duration is None:
        return "at once"
    number, unit = int(duration[:-1]), {"s": "second", "m": "minute", "h": "hour"}[duration[-1]]
    return f"for {number} {unit}" + ("s" if number > 1 else "")


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


def test_the_dashboards_show_no_process_of_other_programs() -> None:
    others = [
        after
        for expression in dashboards.expressions()
        for after in re.findall(r"\bprocess_\w+(\S*)", expression)
    ]

    assert others
    assert all(after.startswith('{job=~"gateway|worker"}') for after in others)


def test_the_rules_with_vllms_names_are_those_of_the_code() -> None:
    assert {path.read_text() for path in vllm_names.FILES} == {vllm_names.rendered()}
