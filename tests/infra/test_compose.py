"""The deployment in containers, as far as it can be checked without a container engine."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from compose_spec import PyCompose

from docs.site.generate import SET_BY_COMPOSE, composed
from gateway.app import MAX_CLOSING_S
from shared.settings import PREFIX, GatewaySettings, WorkerSettings, variable

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "docker-compose.yml"
RAW = yaml.safe_load(COMPOSE.read_text())
"""The services with all merges, as Compose reads them."""
WITH_DEFAULTS = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", yaml.safe_dump(RAW))
SERVICES: dict[str, Any] = PyCompose.from_yaml(WITH_DEFAULTS).to_dict()["services"]
DOCKERFILES = sorted((ROOT / "infra" / "docker").glob("Dockerfile.*"))
EXAMPLE = (ROOT / ".env.example").read_text()


def known_variables() -> set[str]:
    return {
        variable(field) for cls in (GatewaySettings, WorkerSettings) for field in cls.model_fields
    }


def load(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text())


def test_an_image_for_gpus_can_compile_launchers() -> None:
    """Triton builds a launcher for each kernel, with gcc, when the kernel is first launched."""
    dockerfile = (ROOT / "infra/docker/Dockerfile.worker").read_text()
    _, _, final_stage = dockerfile.rpartition("FROM ${BASE}\n")

    assert re.search(r'\[ "\$DEVICE" = cuda \].*\binstall .*gcc libc6-dev', final_stage, re.DOTALL)
    assert "TRITON_CACHE_DIR=/var/cache/triton " in final_stage


@pytest.mark.parametrize("name", ["worker", "worker-gpu", "worker-engine"])
def test_workers_share_no_compiled_code(name: str) -> None:
    """They run what Triton's cache holds, and may not trust each other."""
    worker = SERVICES[name]

    assert "/var/cache/triton" in RAW["services"][name]["volumes"]
    assert "TRITON_CACHE_DIR" not in worker["environment"]


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
    build = {"pyproject.toml", "constraints.txt", "README.md", "infra/wheel.py"}
    assert sides | build | {"infra/docker/*.lock"} == admitted


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


def test_only_this_machine_reaches_the_ports_by_default() -> None:
    ports = [port for service in RAW["services"].values() for port in service.get("ports", [])]

    assert len(ports) >= 5
    shared = "${PROXY_ADDRESS:-127.0.0.1}:"
    assert [port for port in ports if not port.startswith(("127.0.0.1:", shared))] == []
    assert [port for port in ports if port.startswith(shared)] == [
        f"{shared}${{PROXY_HTTPS_PORT:-8443}}:8443"
    ]


def test_every_published_port_can_be_chosen() -> None:
    ports = [port for service in RAW["services"].values() for port in service.get("ports", [])]
    chosen = [re.search(r":\$\{(\w+_PORT):-(\d+)\}:\d+$", port) for port in ports]

    named = {(one[1], one[2]) for one in chosen if one is not None}
    assert len(named) == len(ports)
    assert named == set(re.findall(r"^# (\w+_PORT)=(\d+)$", EXAMPLE, re.MULTILINE))


def test_every_secret_comes_from_the_environment() -> None:
    wanted = set(re.findall(r"\$\{(\w+):\?", COMPOSE.read_text()))

    assert wanted == set(re.findall(r"^(\w+)=$", EXAMPLE, re.MULTILINE))
    users = load("infra/rabbitmq/definitions.json")["users"]
    passwords = {f"{user['name'].upper()}_PASSWORD" for user in users}
    assert wanted == {*passwords, "WARREN_SECRET", "GRAFANA_PASSWORD"}


def test_workers_and_observability_are_profiles() -> None:
    profiles = {name: service.get("profiles", []) for name, service in SERVICES.items()}
    observers = {name for name, of in profiles.items() if of == ["observability"]}

    assert observers == {"collector", "grafana", "prometheus", "tempo"}
    assert (profiles["worker"], profiles["worker-gpu"]) == (["cpu"], ["gpu"])
    assert profiles["worker-engine"] == profiles["engine"] + profiles["engine-gpu"]
    assert {of[0] for of in profiles.values() if of} == {
        *("cpu", "gpu", "engine", "engine-gpu"),
        "observability",
    }
    assert "COMPOSE_PROFILES=cpu\n" in EXAMPLE


def test_a_setting_of_env_reaches_every_service_that_has_it() -> None:
    compose = COMPOSE.read_text()

    assert compose == composed(compose), "run python -m docs.site.generate"
    workers = ("worker", "worker-gpu", "worker-engine")
    of_workers = dict.fromkeys(workers, WorkerSettings.model_fields)
    for service, fields in {"gateway": GatewaySettings.model_fields, **of_workers}.items():
        wanted = {variable(name) for name in fields if name not in SET_BY_COMPOSE}
        assert wanted <= set(RAW["services"][service]["environment"])


def test_gateways_can_be_scaled_behind_the_proxy_and_need_keys() -> None:
    gateway = RAW["services"]["gateway"]

    assert not {"container_name", "ports", "hostname"} & set(gateway)
    assert gateway["environment"]["WARREN_KEYS_FILE"]
    assert (
        RAW["services"]["keys"]["environment"]["WARREN_KEYS_FILE"]
        == (gateway["environment"]["WARREN_KEYS_FILE"])
    )


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_a_service_may_do_no_more_than_it_needs(name: str) -> None:
    service = RAW["services"][name]

    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    # A volume belongs to the image's user, and root without capabilities cannot write to it.
    assert service.get("user") != "root"
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["mem_limit"]
    assert 0 < service["pids_limit"] <= 4096
    assert service["logging"]["options"] == {"max-size": "10m", "max-file": "3"}


def test_a_worker_finds_the_engine_of_its_profile() -> None:
    worker, gpu = RAW["services"]["worker-engine"], RAW["services"]["engine-gpu"]

    assert worker["environment"]["WARREN_ENGINE_URL"].endswith(":-http://engine:8000}")
    assert gpu["networks"]["default"]["aliases"] == ["engine"]
    (device,) = gpu["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])


PINNED = re.compile(r"^(\$\{BASE_IMAGE:-)?[a-z/-]+@sha256:[0-9a-f]{64}\}?$")


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_an_image_is_built_here_or_has_a_digest(name: str) -> None:
    service = RAW["services"][name]

    is_chosen = service["image"].startswith("${ENGINE_IMAGE:-")
    assert "build" in service or is_chosen or PINNED.search(service["image"])


def test_an_image_for_cpus_has_no_cuda() -> None:
    dockerfile = (ROOT / "infra/docker/Dockerfile.worker").read_text()

    assert re.search(r"^ARG DEVICE=cpu$", dockerfile, re.MULTILINE)
    assert "DEVICE" not in RAW["services"]["worker"]["build"]["args"]
    assert RAW["services"]["worker-gpu"]["build"]["args"]["DEVICE"] == "cuda"


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.suffix)
def test_every_image_that_one_begins_with_has_a_digest(dockerfile: Path) -> None:
    begun_with = re.findall(r"^FROM (\S+)", dockerfile.read_text(), re.MULTILINE)
    (base,) = re.findall(r"^ARG BASE=(\S+)$", dockerfile.read_text(), re.MULTILINE)
    built = [one["build"] for one in RAW["services"].values() if "build" in one]

    assert set(begun_with) == {"${BASE}"}
    assert PINNED.search(base)
    assert {build["args"]["BASE"] for build in built} == {f"${{BASE_IMAGE:-{base}}}"}


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
    assert len(set(secrets)) == 6
    assert (tmp_path / ".env").stat().st_mode & 0o077 == 0


def test_a_gateway_has_more_time_to_end_than_its_drain_takes() -> None:
    allowed = RAW["services"]["gateway"]["stop_grace_period"]

    assert int(allowed.removesuffix("s")) >= GatewaySettings().drain_grace_s + MAX_CLOSING_S


def test_the_page_shows_a_second_model_that_compose_accepts() -> None:
    page = (ROOT / "docs" / "deployment" / "index.md").read_text()
    shown = re.search(r"<!-- second model -->\n```yaml\n(.*?)```", page, re.DOTALL)
    assert shown is not None

    (service,) = PyCompose.from_yaml(shown[1]).to_dict()["services"].values()
    base = SERVICES[service["extends"]["service"]]

    assert (COMPOSE.parent / service["extends"]["file"]) == COMPOSE
    assert set(service["environment"]) <= known_variables()
    assert "WARREN_MODEL" in base["environment"]
