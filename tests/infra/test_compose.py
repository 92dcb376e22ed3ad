"""The deployment in containers, as far as it can be checked without a container engine."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from compose_spec import PyCompose

from shared.settings import PREFIX, GatewaySettings, WorkerSettings, variable

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "docker-compose.yml"
SERVICES: dict[str, Any] = PyCompose.from_yaml(COMPOSE.read_text()).to_dict()["services"]
DOCKERFILES = sorted((ROOT / "infra" / "docker").glob("Dockerfile.*"))
EXAMPLE = (ROOT / ".env.example").read_text()


def known_variables() -> set[str]:
    return {
        variable(field) for cls in (GatewaySettings, WorkerSettings) for field in cls.model_fields
    }


def load(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text())


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.suffix)
def test_a_dockerfile_keeps_dockers_best_practices(dockerfile: Path) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")

    checked = subprocess.run([hadolint, dockerfile], text=True, capture_output=True)

    assert (checked.returncode, checked.stdout) == (0, "")


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.suffix)
def test_an_image_does_not_run_as_root_and_says_whether_it_is_well(dockerfile: Path) -> None:
    last_stage = dockerfile.read_text().split("\nFROM ")[-1]

    assert re.search(r"^USER [1-9]\d*$", last_stage, re.MULTILINE)
    assert re.search(r"^HEALTHCHECK ", last_stage, re.MULTILINE)


def test_the_images_context_holds_all_that_is_installed() -> None:
    admitted = set(re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE))

    sides = {"cli", "gateway", "kernels", "shared", "worker", "warren.py"}
    assert sides | {"pyproject.toml", "constraints.txt", "README.md"} == admitted


def test_settings_of_images_and_services_exist() -> None:
    texts = [path.read_text() for path in (COMPOSE, *DOCKERFILES, ROOT / ".env.example")]

    named = {name for text in texts for name in re.findall(rf"\b{PREFIX}[A-Z_]+\b", text)}

    assert named - known_variables() == set()
    assert "WARREN_BROKER" in named


def test_builds_and_mounted_files_exist() -> None:
    builds = [SERVICES[name]["build"]["dockerfile"] for name in ("gateway", "worker")]
    mounts = re.findall(r"- \./([^:]+):", COMPOSE.read_text())

    assert [path for path in [*builds, *mounts] if not (ROOT / path).exists()] == []
    assert len(mounts) >= 4


def test_workers_can_be_scaled() -> None:
    assert not {"container_name", "ports", "hostname"} & set(SERVICES["worker"])


def test_every_service_that_others_wait_for_says_when_it_is_well() -> None:
    for service in SERVICES.values():
        for name, dependency in (service.get("depends_on") or {}).items():
            condition = dependency["condition"]
            assert "healthcheck" in SERVICES[name] or condition == "service_completed_successfully"


def test_only_this_machine_reaches_the_ports() -> None:
    ports = re.findall(r"- (\S*:\d+:\d+)", COMPOSE.read_text())

    assert len(ports) >= 3
    assert [port for port in ports if not port.startswith("127.0.0.1:")] == []


def test_every_secret_comes_from_the_environment() -> None:
    wanted = set(re.findall(r"\$\{(\w+):\?", COMPOSE.read_text()))

    assert wanted == set(re.findall(r"^(\w+)=$", EXAMPLE, re.MULTILINE))
    users = load("infra/rabbitmq/definitions.json")["users"]
    passwords = {f"{user['name'].upper()}_PASSWORD" for user in users}
    assert wanted == {*passwords, "WARREN_SECRET"}


def test_observability_is_a_profile_of_its_own() -> None:
    profiles = {name: service.get("profiles", []) for name, service in SERVICES.items()}

    assert {name for name, of in profiles.items() if of == ["observability"]} == {
        "collector",
        "prometheus",
    }
    assert all(of in ([], ["observability"]) for of in profiles.values())


def test_the_broker_reads_the_definitions_that_are_rendered() -> None:
    conf = (ROOT / "infra/rabbitmq/rabbitmq.conf").read_text()
    (path,) = re.findall(r"^load_definitions = (.+)$", conf, re.MULTILINE)
    (mount,) = re.findall(r"- definitions:(/etc/\S+):ro", COMPOSE.read_text())

    assert Path(path).parent == Path(mount)
    assert Path(path).name in SERVICES["credentials"]["command"][-1]


def test_prometheus_scrapes_every_service_with_metrics() -> None:
    jobs = load("infra/prometheus/prometheus.yml")["scrape_configs"]

    services = {job["job_name"].removesuffix("-queues") for job in jobs}
    assert services == {"gateway", "worker", "rabbitmq"} <= set(SERVICES)


def test_the_collector_has_every_part_of_its_pipelines() -> None:
    collector = load("infra/otel/collector.yaml")

    for pipeline in collector["service"]["pipelines"].values():
        for kind, names in pipeline.items():
            assert set(names) <= set(collector[kind])


def test_make_writes_each_password_and_the_secret_once(tmp_path: Path) -> None:
    for name in ("Makefile", ".env.example"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())

    for _ in range(2):
        subprocess.run(["make", ".env"], cwd=tmp_path, check=True, capture_output=True)

    text = (tmp_path / ".env").read_text()
    secrets = re.findall(r"^(?:\w+_PASSWORD|WARREN_SECRET)=([0-9a-f]{64})$", text, re.MULTILINE)
    assert len(set(secrets)) == 5
    assert (tmp_path / ".env").stat().st_mode & 0o077 == 0
