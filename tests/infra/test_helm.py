"""The Helm chart: rendered by Helm, and checked against the schemas of Kubernetes and of KEDA."""

import base64
import importlib
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import helm_python
import jsonschema
import kubernetes_validate
import pytest
import yaml
from helm_python import HelmError

from gateway.app import MAX_CLOSING_S
from shared.settings import GatewaySettings, WorkerSettings, variable
from tests.support.deployment.helm import (
    CHART,
    KEYS,
    NAMESPACE,
    Manifest,
    container_of,
    find,
    render,
    variables_of,
)
from tests.support.deployment.processes import ROOT

OLDEST, NEWEST = "1.27", "1.37"
"""Versions of Kubernetes: the chart's oldest, and the newest that there are schemas for."""
MODELS = {
    "keda.sh/v1alpha1": "cloudcoil.models.keda.v1alpha1",
    "monitoring.coreos.com/v1": "cloudcoil.models.prometheus_operator.v1",
}
"""Generated from the definitions of KEDA and of the Prometheus operator."""
RUNBOOK_URL = "https://warren.example/docs/runbooks.html"
"""The placeholder of the shipped rules."""
RABBITMQ_API = "rabbitmq.com/v1beta1"
OF_RABBITMQ: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "replicas": {"type": "integer"},
        "image": {"type": "string"},
        "persistence": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "storage": {"type": "string"},
                "storageClassName": {"type": "string"},
            },
        },
        "resources": {"type": "object"},
        "rabbitmq": {
            "type": "object",
            "additionalProperties": False,
            "properties": {"additionalConfig": {"type": "string"}},
        },
        "override": {
            "type": "object",
            "additionalProperties": False,
            "properties": {"statefulSet": {"type": "object"}},
        },
    },
}
"""The part of a RabbitmqCluster's spec that the chart uses. No package has the whole definition, in
config/crd/bases/rabbitmq.com_rabbitmqclusters.yaml of github.com/rabbitmq/cluster-operator."""
EVERYTHING: dict[str, Any] = {
    "settings": {"log_level": "debug", "max_body_bytes": 16 << 20, "batch_invariant": True},
    "workers": {
        "small": {
            "model": "smollm2",
            "replicas": 0,
            "settings": {"batch_invariant": False, "served_name": "small"},
            "modelVolume": {"existingClaim": "models"},
        },
        "large": {
            "model": "/models/Qwen3-8B",
            "gpus": 1,
            "maxSurge": 0,
            "hfTokenSecret": "hub",
            "autoscaling": {"enabled": True, "minReplicas": 0},
            "nodeSelector": {"gpu": "h100"},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        },
    },
    "gateway": {
        "settings": {"cors_origins": ["https://a.example", "https://b.example"]},
        "ingress": {"enabled": True, "host": "llm.example", "tlsSecret": "tls"},
    },
    "networkPolicy": {
        "gatewayFrom": [{"namespaceSelector": {"matchLabels": {"name": "ingress"}}}],
        "metricsFrom": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}],
        "brokerFrom": [{"namespaceSelector": {"matchLabels": {"name": "publishers"}}}],
        "extraEgress": [{"ports": [{"port": 4318}]}],
    },
    "monitoring": {
        "enabled": True,
        "labels": {"release": "prometheus"},
        "apiKeySecret": "scraper",
        "rules": {"enabled": True, "runbookUrl": "https://docs.example/warren/runbooks.html"},
        "dashboards": {"enabled": True},
    },
}
SHARED: dict[str, Any] = {
    "gateway": {
        "replicas": 2,
        "databaseSecret": "postgres",
        "environmentSecret": "s3",
        "settings": {"files_url": "s3://bucket"},
    }
}
ENGINE: dict[str, Any] = {
    "workers": {
        "qwen": {
            "model": "Qwen/Qwen3-32B",
            "gpus": 2,
            "drainSeconds": 45,
            "hfTokenSecret": "hub",
            "engine": {
                "kind": "vllm",
                "image": "vllm/vllm-openai:v0.32.0",
                "args": ["--model", "Qwen/Qwen3-32B", "--tensor-parallel-size", "2"],
                "sharedMemory": "8Gi",
            },
        }
    }
}


def recipe(heading: str) -> dict[str, Any]:
    """The values that a section of the page about Kubernetes shows."""
    page = (ROOT / "docs" / "deployment" / "kubernetes.md").read_text()
    section = page.split(f"## {heading}\n")[1].split("\n## ")[0]
    values: dict[str, Any] = yaml.safe_load(section.split("```yaml\n")[1].split("```")[0])
    return values


SPOT = recipe("Spot nodes")
VALUES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "engine": ENGINE,
    "shared": SHARED,
    "everything": EVERYTHING,
    "spot": SPOT,
    "existing": {
        "broker": {"mode": "existing", "existingSecret": "broker"},
        "gateway": {"existingSecret": "secret", "volume": {"existingClaim": "files"}},
        "apiKeys": {"existingSecret": "", "allowAnonymous": True},
        "networkPolicy": {"enabled": False},
    },
}


@pytest.fixture(scope="module")
def everything() -> list[Manifest]:
    return render(EVERYTHING)


def check(manifest: Manifest, version: str) -> None:
    """Raise an error unless the manifest has every required field, and only fields of its kind."""
    kind, api = manifest["kind"], manifest["apiVersion"]
    if kind == "RabbitmqCluster":
        assert api == RABBITMQ_API
        jsonschema.validate(manifest["spec"], OF_RABBITMQ)
    elif api in MODELS:
        model = getattr(importlib.import_module(MODELS[api]), kind)
        read = model.model_validate(manifest)
        known = read.model_dump(mode="json", by_alias=True, exclude_unset=True)
        assert known["spec"] == manifest["spec"], "fields were dropped"
    else:
        kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("name", VALUES)
def test_every_manifest_is_valid(name: str, version: str) -> None:
    manifests = render(VALUES[name])

    for manifest in manifests:
        check(manifest, version)
    names = [(manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("field", ["replica", "minReplicas"])
def test_a_planted_fault_is_found(everything: list[Manifest], field: str) -> None:
    kind = "Deployment" if field == "replica" else "ScaledObject"
    faulty = json.loads(json.dumps(find(everything, kind, "warren-worker-large")))
    faulty["spec"][field] = 3

    with pytest.raises((kubernetes_validate.ValidationError, AssertionError, ValueError)):
        check(faulty, NEWEST)


@pytest.mark.parametrize("name", VALUES)
def test_the_chart_passes_helms_strict_lint(name: str) -> None:
    report = helm_python.lint(CHART, {**KEYS, **VALUES[name]}, strict=True)

    assert report["errors"] == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"apiKeys": {"existingSecret": ""}}, "API keys are required"),
        ({"broker": {"mode": "existing"}}, "needs broker.existingSecret"),
        ({"broker": {"mode": "cloud"}}, "broker"),
        ({"gatway": {}}, "gatway"),
        ({"workers": {"small": {}}}, "model"),
        ({"workers": {"Small": {"model": "m"}}}, "Small"),
        ({"workers": {"m": {"model": "m", "engine": {"kind": "tgi", "image": "i"}}}}, "kind"),
        ({"workers": {"m": {"model": "m", "engine": {"kind": "vllm"}}}}, "engine.image"),
        ({"gateway": {"replicas": "two"}}, "replicas"),
        ({"monitoring": {"rules": {"runbookUrl": "docs.example"}}}, "runbookUrl"),
        ({"gateway": {"replicas": 2}}, "common database"),
        ({"gateway": {"replicas": 2, "databaseSecret": "postgres"}}, "file storage"),
        ({"gateway": {"replicas": 2, "settings": {"files_url": "s3://b"}}}, "common database"),
        (
            {
                "monitoring": {"enabled": True},
                "networkPolicy": {"gatewayFrom": EVERYTHING["networkPolicy"]["gatewayFrom"]},
            },
            "networkPolicy.metricsFrom",
        ),
    ],
)
def test_values_that_cannot_work_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(HelmError, match=message):
        render(values)


@pytest.mark.parametrize(
    ("place", "name", "instead"),
    [
        ("settings", "drain_grace_s", "set drainSeconds of the gateway or of the pool instead"),
        ("settings", "broker", "set broker.existingSecret instead"),
        ("settings", "model", "set model of the pool instead"),
        ("gateway.settings", "port", "set gateway.service.port instead"),
        ("gateway.settings", "host", "the chart sets it"),
        ("gateway.settings", "secret", "set gateway.existingSecret instead"),
        ("gateway.settings", "keys_file", "set apiKeys.existingSecret instead"),
        ("gateway.settings", "database_url", "set gateway.databaseSecret instead"),
        ("workers.large.settings", "model", "set model of the pool instead"),
        ("workers.large.settings", "device", "set gpus of the pool instead"),
        ("workers.large.settings", "health_port", "the chart sets it"),
    ],
)
def test_a_setting_that_the_chart_would_replace_is_refused(
    place: str, name: str, instead: str
) -> None:
    values: dict[str, Any] = {
        "workers": {"large": {"model": "m", "gpus": 1}},
        "gateway": {"databaseSecret": "postgres"},
    }
    target = values
    for key in place.split("."):
        target = target.setdefault(key, {})
    target[name] = "1"

    with pytest.raises(HelmError, match=re.escape(f"{place}.{name} has no effect: {instead}")):
        render(values)


@pytest.mark.parametrize(
    ("name", "instead"), [("engine", "engine.kind"), ("engine_url", "engine.port")]
)
def test_an_engine_is_chosen_in_one_place(name: str, instead: str) -> None:
    pool = {**ENGINE["workers"]["qwen"], "settings": {name: "vllm"}}

    with pytest.raises(HelmError, match=f"{name} has no effect: set {instead} of the pool instead"):
        render({"workers": {"qwen": pool}})


def test_an_engine_has_the_gpus_and_outlives_the_workers_drain() -> None:
    deployment = find(render(ENGINE), "Deployment", "warren-worker-qwen")
    pod = deployment["spec"]["template"]["spec"]
    worker, engine = pod["containers"]

    variables = {one["name"]: one.get("value") for one in worker["env"]}
    url = f"http://127.0.0.1:{engine['ports'][0]['containerPort']}"
    assert (variables["WARREN_ENGINE"], variables["WARREN_ENGINE_URL"]) == ("vllm", url)
    assert "WARREN_DEVICE" not in variables
    assert worker["image"].startswith("warren-worker:")
    assert "nvidia.com/gpu" not in worker["resources"]["limits"]
    assert engine["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert engine["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "45"]
    assert pod["terminationGracePeriodSeconds"] > 45


def test_an_engine_is_watched_and_confined_as_a_worker_is() -> None:
    deployment = find(render(ENGINE), "Deployment", "warren-worker-qwen")
    worker, engine = deployment["spec"]["template"]["spec"]["containers"]

    probes = ("startupProbe", "livenessProbe", "readinessProbe")
    assert {engine[probe]["httpGet"]["path"] for probe in probes} == {"/health"}
    assert engine["startupProbe"]["failureThreshold"] == worker["startupProbe"]["failureThreshold"]
    assert engine["securityContext"] == worker["securityContext"]
    mounts = {mount["name"]: mount["mountPath"] for mount in engine["volumeMounts"]}
    assert mounts["shared-memory"] == "/dev/shm"


def test_anonymous_access_is_allowed_in_one_place() -> None:
    keys = {"existingSecret": "", "allowAnonymous": True}
    values = {"apiKeys": keys, "gateway": {"settings": {"allow_anonymous": False}}}

    with pytest.raises(HelmError, match=r"set apiKeys\.allowAnonymous instead"):
        render(values)


def test_workers_of_a_revision_are_scaled_by_the_metrics_of_their_model() -> None:
    pool = {"model": "org/name@abc123", "autoscaling": {"enabled": True}}

    assert 'model="org/name"' in query_of(render({"workers": {"large": pool}}))


def test_a_gateway_has_an_hour_to_migrate_its_database() -> None:
    (container,) = find(render(), "Deployment", "warren-gateway")["spec"]["template"]["spec"][
        "containers"
    ]

    probe = container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 3600


@pytest.mark.parametrize("name", ["warren-gateway", "warren-worker-small", "warren-worker-large"])
def test_a_rollout_does_not_fail_while_a_pod_may_still_start(
    everything: list[Manifest], name: str
) -> None:
    deployment = find(everything, "Deployment", name)

    probe = container_of(deployment)["startupProbe"]
    start_s = probe["periodSeconds"] * probe["failureThreshold"]
    assert deployment["spec"]["progressDeadlineSeconds"] == start_s + 600


def test_one_gateway_keeps_what_it_stores_in_a_volume() -> None:
    manifests = render()
    spec = find(manifests, "Deployment", "warren-gateway")["spec"]

    claim = find(manifests, "PersistentVolumeClaim", "warren-gateway")
    assert volumes_of(spec)["files"] == {"persistentVolumeClaim": {"claimName": "warren-gateway"}}
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})
    assert gateway_ports(manifests).isdisjoint({5432, 443})


def test_several_gateways_share_a_database_and_a_storage_that_they_may_reach() -> None:
    manifests = render(SHARED)
    gateway = find(manifests, "Deployment", "warren-gateway")

    volumes, container = volumes_of(gateway["spec"]), container_of(gateway)
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    url_file = f"{mounts['database']}/database-url"
    assert variables_of(gateway)["WARREN_DATABASE_URL"] == f"file:{url_file}"
    assert volumes["database"]["secret"]["secretName"] == "postgres"
    assert volumes["files"] == {"emptyDir": {}}
    assert container["envFrom"] == [{"secretRef": {"name": "s3"}}]
    assert gateway["spec"]["strategy"]["type"] == "RollingUpdate"
    assert gateway_ports(manifests) >= {5432, 443}
    assert all(manifest["kind"] != "PersistentVolumeClaim" for manifest in manifests)


def volumes_of(spec: dict[str, Any]) -> dict[str, dict[str, Any]]:
    volumes = [dict(volume) for volume in spec["template"]["spec"]["volumes"]]
    return {volume.pop("name"): volume for volume in volumes}


def gateway_ports(manifests: list[Manifest]) -> set[int]:
    """The ports that gateways may reach."""
    policy = find(manifests, "NetworkPolicy", "warren-gateway")
    return {port["port"] for rule in policy["spec"]["egress"] for port in rule["ports"]}


def test_every_variable_of_a_pod_is_a_setting(everything: list[Manifest]) -> None:
    known = {
        variable(field) for cls in (GatewaySettings, WorkerSettings) for field in cls.model_fields
    }

    for name in ("warren-gateway", "warren-worker-small", "warren-worker-large"):
        named = variables_of(find(everything, "Deployment", name))
        assert {one for one in named if one.startswith("WARREN_")} - known == set()


def test_a_setting_of_a_pool_wins_and_whole_numbers_stay_whole(everything: list[Manifest]) -> None:
    small = variables_of(find(everything, "Deployment", "warren-worker-small"))
    large = variables_of(find(everything, "Deployment", "warren-worker-large"))
    gateway = variables_of(find(everything, "Deployment", "warren-gateway"))

    assert (small["WARREN_BATCH_INVARIANT"], large["WARREN_BATCH_INVARIANT"]) == ("false", "true")
    assert gateway["WARREN_MAX_BODY_BYTES"] == str(16 << 20)
    assert gateway["WARREN_CORS_ORIGINS"] == "https://a.example,https://b.example"


def test_the_charts_own_pool_can_be_removed() -> None:
    pools = {"large": {"model": "m"}}

    def named(workers: dict[str, Any]) -> list[str]:
        manifests = render({"workers": workers})
        deployments = [one for one in manifests if one["kind"] == "Deployment"]
        return [one["metadata"]["name"].removeprefix("warren-") for one in deployments]

    assert named(pools) == ["gateway", "worker-large", "worker-smollm2"]
    assert named({**pools, "smollm2": None}) == ["gateway", "worker-large"]


def test_a_pool_may_be_empty_and_an_autoscaled_one_leaves_its_size_to_keda(
    everything: list[Manifest],
) -> None:
    assert find(everything, "Deployment", "warren-worker-small")["spec"]["replicas"] == 0
    assert "replicas" not in find(everything, "Deployment", "warren-worker-large")["spec"]


def test_keda_asks_for_the_queue_of_the_name_that_clients_use(everything: list[Manifest]) -> None:
    scaled = find(everything, "ScaledObject", "warren-worker-large")

    assert scaled["spec"]["scaleTargetRef"]["name"] == "warren-worker-large"
    assert 'model="Qwen3-8B"' in query_of(everything)
    assert 'namespace="llm"' in query_of(everything)


def test_keda_leaves_room_in_the_batches_of_cpus() -> None:
    autoscaled = {"model": "smollm2", "autoscaling": {"enabled": True}}
    pools = {
        "cpu": autoscaled,
        "gpu": autoscaled | {"gpus": 1},
        "own": {"model": "smollm2", "autoscaling": {"enabled": True, "jobsPerReplica": 5}},
    }
    manifests = render({"workers": pools})

    scaled = [find(manifests, "ScaledObject", f"warren-worker-{pool}") for pool in pools]
    thresholds = [one["spec"]["triggers"][0]["metadata"]["threshold"] for one in scaled]
    assert thresholds == ["6", "48", "5"]


def test_keda_may_ask_for_what_is_due_within_a_minute() -> None:
    pool = {"model": "smollm2", "autoscaling": {"enabled": True, "dueTokensPerReplica": 20_000}}
    scaled = find(render({"workers": {"large": pool}}), "ScaledObject", "warren-worker-large")

    _, due = scaled["spec"]["triggers"]
    assert due["metadata"]["threshold"] == "20000"
    assert due["metadata"]["query"] == (
        'sum(warren_gateway_due_tokens{namespace="llm",model="smollm2",'
        'class=~"interactive|batch",within_s="60"})'
    )


def test_a_pool_keeps_its_size_while_prometheus_has_no_answer() -> None:
    pool = {"model": "smollm2", "autoscaling": {"enabled": True, "minReplicas": 1}}
    scaled = find(render({"workers": {"large": pool}}), "ScaledObject", "warren-worker-large")

    (trigger,) = scaled["spec"]["triggers"]
    assert "fallback" not in scaled["spec"]
    assert trigger["metadata"]["ignoreNullValues"] == "false"


def query_of(manifests: list[Manifest]) -> str:
    """What KEDA asks Prometheus for the pool ``large``."""
    (trigger,) = find(manifests, "ScaledObject", "warren-worker-large")["spec"]["triggers"]
    query: str = trigger["metadata"]["query"]
    return query


def test_keda_asks_for_metrics_that_there_are(everything: list[Manifest]) -> None:
    page = (ROOT / "docs/metrics.md").read_text()

    asked = set(re.findall(r"warren_\w+", query_of(everything)))
    assert "warren_worker_sequences_running" in asked
    assert asked <= set(re.findall(r"^\| `(\w+)`", page, re.MULTILINE))


QUEUED = {
    'warren_queue_jobs_waiting{POOL,class="interactive",instance="g1"}': 3,
    'warren_queue_jobs_waiting{POOL,class="interactive",instance="g2"}': 3,
    'warren_queue_jobs_waiting{POOL,class="batch",instance="g1"}': 4,
}
TAKEN = {
    f'warren_worker_{gauge}{{POOL,class="{job_class}",instance="{worker}"}}': value
    for gauge, value in (("jobs_waiting", 10), ("sequences_waiting", 20), ("sequences_running", 50))
    for job_class in ("interactive", "batch")
    for worker in ("w1", "w2")
}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="Prometheus is not installed")
@pytest.mark.parametrize(
    ("values", "size"),
    [
        pytest.param(QUEUED, 7, id="a pool without workers"),
        pytest.param(QUEUED | TAKEN, 7 + 320, id="a busy pool"),
        pytest.param(TAKEN, None, id="no gateway"),
    ],
)
def test_keda_counts_what_waits_and_what_runs(
    everything: list[Manifest], tmp_path: Path, values: dict[str, int], size: int | None
) -> None:
    pool = 'namespace="llm",model="Qwen3-8B"'
    series = [
        {"series": name.replace("POOL", pool), "values": f"{value}x4"}
        for name, value in values.items()
    ]
    expected = [] if size is None else [{"labels": "{}", "value": size}]
    asked = {"expr": query_of(everything), "eval_time": "1m", "exp_samples": expected}
    test = {"interval": "15s", "input_series": series, "promql_expr_test": [asked]}
    (tmp_path / "test.yml").write_text(json.dumps({"tests": [test]}))

    done = subprocess.run(
        ["promtool", "test", "rules", "test.yml"], cwd=tmp_path, capture_output=True, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr


def test_the_jobs_of_the_alerts_are_those_that_the_chart_and_compose_scrape(
    everything: list[Manifest],
) -> None:
    alerts = (ROOT / "infra/prometheus/alerts.rules.yml").read_text()
    scraped = yaml.safe_load((ROOT / "infra/prometheus/prometheus.yml").read_text())

    named = set(re.findall(r'\bjob="([^"]+)"', alerts))
    assert named == {"gateway", "worker"}
    assert named <= jobs_of(everything)
    assert named <= {one["job_name"] for one in scraped["scrape_configs"]}


def jobs_of(manifests: list[Manifest]) -> set[str]:
    """The values of the label ``job`` that the monitors give."""
    specs = [one["spec"] for one in manifests if one["kind"] in {"ServiceMonitor", "PodMonitor"}]
    return {
        rule["replacement"]
        for spec in specs
        for endpoint in spec.get("endpoints") or spec["podMetricsEndpoints"]
        for rule in endpoint["relabelings"]
        if rule["targetLabel"] == "job"
    }


def test_the_charts_rules_are_those_of_compose(everything: list[Manifest]) -> None:
    rule = find(everything, "PrometheusRule", "warren")

    assert rule["metadata"]["labels"]["release"] == "prometheus"
    shipped = shipped_groups("https://docs.example/warren/runbooks.html")
    assert without_namespace(rule["spec"]["groups"]) == shipped


def test_alerts_without_an_address_of_the_runbooks_have_no_links() -> None:
    values = {"monitoring": {"rules": {"enabled": True}}}
    groups = find(render(values), "PrometheusRule", "warren")["spec"]["groups"]

    expected = shipped_groups("")
    links = [
        rule["annotations"].pop("runbook_url")
        for group in expected
        for rule in group["rules"]
        if "alert" in rule
    ]
    assert len(links) > 1
    assert without_namespace(groups) == expected


def without_namespace(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rules as `shipped_groups` returns them. Each must have the label and the matcher."""
    for rule in (rule for group in groups for rule in group["rules"]):
        assert rule["labels"].pop("namespace") == NAMESPACE
        if not rule["labels"]:
            del rule["labels"]
        matcher = f'namespace="{NAMESPACE}"'
        assert matcher in rule["expr"]
        rule["expr"] = rule["expr"].replace(f"{{{matcher}}}", "").replace(f"{matcher},", "")
    return groups


@pytest.mark.skipif(shutil.which("promtool") is None, reason="Prometheus is not installed")
@pytest.mark.parametrize(
    ("own", "others"),
    [
        ("a deployment that is well", "a deployment in trouble"),
        ("a deployment in trouble", "a deployment that is well"),
    ],
)
def test_alerts_do_not_depend_on_a_release_in_another_namespace(
    tmp_path: Path, own: str, others: str
) -> None:
    values = {"monitoring": {"rules": {"enabled": True}}}
    rules = find(render(values), "PrometheusRule", "warren")["spec"]
    text = (ROOT / "infra/prometheus/alerts_test.yml").read_text()
    # 0x80 is 80 times 0 to promtool, and 128 to YAML.
    shipped = yaml.safe_load(re.sub(r"(?m)^( +values:) (.+)$", r'\1 "\2"', text))
    tests = {test["name"]: test for test in shipped["tests"]}
    firing, _ = tests["a deployment in trouble"]["promql_expr_test"]
    expected = firing if own == "a deployment in trouble" else {**firing, "exp_samples": []}
    series = [
        {**one, "series": in_namespace(one["series"], namespace)}
        for name, namespace in ((own, NAMESPACE), (others, "other"))
        for one in tests[name]["input_series"]
    ]
    test = {"interval": "15s", "input_series": series, "promql_expr_test": [expected]}
    (tmp_path / "rules.yml").write_text(json.dumps(rules))
    whole = {"rule_files": ["rules.yml"], "evaluation_interval": "15s", "tests": [test]}
    (tmp_path / "test.yml").write_text(json.dumps(whole))

    done = subprocess.run(
        ["promtool", "test", "rules", "test.yml"], cwd=tmp_path, capture_output=True, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr


def test_an_upgrade_may_replace_one_side_after_the_other() -> None:
    """Pods whose image stays are not replaced: nothing else in them has the chart's version."""
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    before = render({"images": {"tag": "0.0.9"}})
    halfway = render({"images": {"gatewayTag": "0.0.9"}})

    gateway, worker = (
        find(halfway, "Deployment", f"warren-{of}") for of in ("gateway", "worker-smollm2")
    )

    assert gateway["spec"] == find(before, "Deployment", "warren-gateway")["spec"]
    assert container_of(worker)["image"] == f"warren-worker:{version}"
    for deployment in (gateway, worker):
        assert version not in deployment["spec"]["template"]["metadata"]["labels"].values()


def in_namespace(series: str, namespace: str) -> str:
    name, _, labels = series.removesuffix("}").partition("{")
    return f'{name}{{namespace="{namespace}"{labels and ", "}{labels}}}'


def shipped_groups(runbook_url: str) -> list[dict[str, Any]]:
    """The groups of rules for compose, with this address of the runbooks and no spaces before
    matchers."""
    texts = [path.read_text() for path in sorted((ROOT / "infra/prometheus").glob("*.rules.yml"))]
    groups = [
        group
        for text in texts
        for group in yaml.safe_load(text.replace(RUNBOOK_URL, runbook_url))["groups"]
    ]
    for rule in (rule for group in groups for rule in group["rules"]):
        rule["expr"] = rule["expr"].replace(" {", "{")
    return groups


def test_the_charts_dashboards_are_those_of_compose(everything: list[Manifest]) -> None:
    shipped = (ROOT / "infra/grafana/dashboards").glob("*.json")

    for path in shipped:
        dashboard = find(everything, "ConfigMap", f"warren-dashboard-{path.stem}")
        assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert dashboard["data"] == {f"warren-{path.name}": path.read_text()}


def test_monitoring_is_made_on_demand() -> None:
    kinds = {manifest["kind"] for manifest in render()}

    assert kinds.isdisjoint({"ServiceMonitor", "PodMonitor", "PrometheusRule", "ConfigMap"})


def test_prometheus_sends_gateways_the_api_key_of_its_secret(everything: list[Manifest]) -> None:
    (endpoint,) = find(everything, "ServiceMonitor", "warren-gateway")["spec"]["endpoints"]

    assert endpoint["authorization"] == {"credentials": {"name": "scraper", "key": "key"}}


@pytest.mark.parametrize(
    ("component", "url"), [("gateway", "gateway-url"), ("worker-smollm2", "worker-url")]
)
def test_a_pod_has_its_own_url_of_the_broker_and_the_certificate_of_a_private_authority(
    component: str, url: str
) -> None:
    deployment = find(render(VALUES["existing"]), "Deployment", f"warren-{component}")

    (volume,) = (
        one for one in deployment["spec"]["template"]["spec"]["volumes"] if one["name"] == "broker"
    )
    own, authority = (source["secret"] for source in volume["projected"]["sources"])
    assert own == {"name": "broker", "items": [{"key": url, "path": url}]}
    assert authority == {
        "name": "broker",
        "optional": True,
        "items": [{"key": "ca.crt", "path": "ca.crt"}],
    }


def test_a_gpu_is_requested_by_pools_that_have_one(everything: list[Manifest]) -> None:
    large = find(everything, "Deployment", "warren-worker-large")
    container = container_of(large)

    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert container["image"] == "warren-worker-cuda:0.1.0"
    assert variables_of(large)["WARREN_DEVICE"] == "cuda"
    assert large["spec"]["strategy"]["rollingUpdate"] == {"maxUnavailable": 1, "maxSurge": 0}


@pytest.mark.parametrize(
    ("name", "beyond_s"), [("warren-gateway", 5 + MAX_CLOSING_S), ("warren-worker-small", 20)]
)
def test_a_pod_has_more_time_to_end_than_its_drain_takes(
    everything: list[Manifest], name: str, beyond_s: int
) -> None:
    pod = find(everything, "Deployment", name)
    drain_s = float(variables_of(pod)["WARREN_DRAIN_GRACE_S"])

    assert pod["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] >= drain_s + beyond_s


def test_no_pod_sees_the_variables_of_services_or_the_clusters_token(
    everything: list[Manifest],
) -> None:
    for manifest in everything:
        if manifest["kind"] == "Deployment":
            spec = manifest["spec"]["template"]["spec"]
            assert spec["enableServiceLinks"] is False
            assert spec["automountServiceAccountToken"] is False
            assert container_of(manifest)["securityContext"]["readOnlyRootFilesystem"] is True


def test_the_broker_loads_the_shipped_definitions_with_the_passwords_of_the_urls() -> None:
    secret = find(render(), "Secret", "warren-broker")["data"]
    decoded = {key: base64.b64decode(value).decode() for key, value in secret.items()}
    definitions = json.loads(decoded.pop("definitions.json"))
    shipped = json.loads((ROOT / "infra/rabbitmq/definitions.json").read_text())

    assert json.loads((CHART / "files/definitions.json").read_text()) == shipped
    for user in definitions["users"]:
        url = decoded.pop(f"{user['name']}-url")
        assert url.startswith(f"amqp://{user['name']}:{user['password']}@warren-rabbitmq.llm.svc")
        assert len(user["password"]) == 40
    assert decoded == {}
    assert definitions["permissions"] == shipped["permissions"]


def test_the_operators_configuration_is_the_shipped_one() -> None:
    cluster = find(render(), "RabbitmqCluster", "warren-rabbitmq")
    rendered = settings_of(cluster["spec"]["rabbitmq"]["additionalConfig"])
    shipped = settings_of((ROOT / "infra/rabbitmq/rabbitmq.conf").read_text())

    assert rendered.pop("load_definitions") == "/etc/rabbitmq/warren/definitions.json"
    del shipped["load_definitions"], shipped["loopback_users"]  # the operator makes no guest
    assert rendered == shipped


OF_OPERATOR = {
    "app.kubernetes.io/name": "warren-rabbitmq",
    "app.kubernetes.io/component": "rabbitmq",
}
"""Labels that the cluster operator gives to the pods and Services of the cluster."""


def test_rabbitmqs_pods_are_selected_by_the_labels_of_the_operator(
    everything: list[Manifest],
) -> None:
    cluster = find(everything, "RabbitmqCluster", "warren-rabbitmq")
    pod = cluster["spec"]["override"]["statefulSet"]["spec"]["template"]["spec"]
    (spread,) = pod["topologySpreadConstraints"]
    budget = find(everything, "PodDisruptionBudget", "warren-rabbitmq")
    policy = find(everything, "NetworkPolicy", "warren-rabbitmq")
    monitor = find(everything, "ServiceMonitor", "warren-rabbitmq")

    assert cluster["metadata"]["name"] == OF_OPERATOR["app.kubernetes.io/name"]
    assert spread["labelSelector"]["matchLabels"] == OF_OPERATOR
    assert policy["spec"]["podSelector"]["matchLabels"] == OF_OPERATOR
    for manifest in (budget, monitor):
        assert manifest["spec"]["selector"]["matchLabels"] == OF_OPERATOR


def test_only_gateways_workers_and_named_peers_reach_the_broker(
    everything: list[Manifest],
) -> None:
    amqp, nodes, management, metrics = broker_ingress(everything)
    defaults = broker_ingress(render())

    pods, publishers = amqp["from"]
    assert pods["podSelector"]["matchExpressions"] == [
        {"key": "app.kubernetes.io/component", "operator": "In", "values": ["gateway", "worker"]}
    ]
    assert [publishers] == EVERYTHING["networkPolicy"]["brokerFrom"]
    assert nodes == {"from": [{"podSelector": {"matchLabels": OF_OPERATOR}}]}
    assert [port["port"] for port in management["ports"]] == [15672, 15671]
    assert metrics["from"] == EVERYTHING["networkPolicy"]["metricsFrom"]
    assert defaults == [{**amqp, "from": [pods]}, nodes, management, {"ports": [{"port": 15692}]}]


def broker_ingress(manifests: list[Manifest]) -> list[dict[str, Any]]:
    rules: list[dict[str, Any]] = find(manifests, "NetworkPolicy", "warren-rabbitmq")["spec"][
        "ingress"
    ]
    return rules


def test_rabbitmq_is_scraped_as_compose_does(everything: list[Manifest]) -> None:
    shipped = yaml.safe_load((ROOT / "infra/prometheus/prometheus.yml").read_text())
    jobs = {job["job_name"]: job for job in shipped["scrape_configs"]}
    monitor = find(everything, "ServiceMonitor", "warren-rabbitmq")
    _, queues = monitor["spec"]["endpoints"]
    (keep,) = queues["metricRelabelings"]
    expected = jobs["rabbitmq-queues"]
    (expected_keep,) = expected["metric_relabel_configs"]

    assert jobs_of([monitor]) == {"rabbitmq", "rabbitmq-queues"} <= set(jobs)
    assert (queues["path"], queues["params"]) == (expected["metrics_path"], expected["params"])
    assert keep["sourceLabels"] == expected_keep["source_labels"]
    assert (keep["regex"], keep["action"]) == (expected_keep["regex"], expected_keep["action"])


@pytest.mark.parametrize("name", ["warren-gateway", "warren-worker-small"])
def test_pods_of_one_kind_are_spread_over_the_nodes(everything: list[Manifest], name: str) -> None:
    spec = find(everything, "Deployment", name)["spec"]
    (spread,) = spec["template"]["spec"]["topologySpreadConstraints"]

    assert spread["labelSelector"] == spec["selector"]
    assert spread["whenUnsatisfiable"] == "ScheduleAnyway"


BODY_SIZE = "nginx.ingress.kubernetes.io/proxy-body-size"


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        ({}, "256m"),
        ({"max_body_bytes": 16 << 20}, "256m"),
        ({"max_file_bytes": 2 << 30}, "2104m"),
        ({"max_file_bytes": str(2 << 30)}, "2104m"),
        ({"max_body_bytes": 400 << 20}, "456m"),
    ],
)
def test_an_ingress_passes_on_bodies_as_large_as_the_gateway_accepts(
    settings: dict[str, Any], size: str
) -> None:
    ingress = {"enabled": True, "host": "llm.example"}

    annotations = annotations_of_ingress({"ingress": ingress, "settings": settings})
    assert annotations[BODY_SIZE] == size
    limits = GatewaySettings(**settings)
    allowed = int(size.removesuffix("m")) << 20
    assert allowed - (50 << 20) > max(limits.max_body_bytes, limits.max_file_bytes)


def annotations_of_ingress(gateway: dict[str, Any]) -> dict[str, str]:
    (ingress,) = (one for one in render({"gateway": gateway}) if one["kind"] == "Ingress")
    annotations: dict[str, str] = ingress["metadata"]["annotations"]
    return annotations


def test_an_annotation_of_the_users_own_replaces_that_of_the_chart() -> None:
    ingress = {"enabled": True, "host": "llm.example", "annotations": {BODY_SIZE: "1g"}}

    annotations = annotations_of_ingress({"ingress": ingress})
    assert annotations[BODY_SIZE] == "1g"
    assert annotations["nginx.ingress.kubernetes.io/proxy-buffering"] == "off"


def test_spot_workers_may_ask_for_the_notice_that_they_wait_for() -> None:
    manifests = render(SPOT)

    worker = find(manifests, "Deployment", "warren-worker-spot")
    policies = [one["spec"] for one in manifests if one["kind"] == "NetworkPolicy"]
    allowed = [
        to["ipBlock"]["cidr"]
        for policy in policies
        if "worker" in json.dumps(policy["podSelector"])
        for rule in policy.get("egress", [])
        for to in rule.get("to", [])
        if "ipBlock" in to
    ]
    place = variables_of(worker)["WARREN_INTERRUPTION_NOTICE"]
    assert WorkerSettings(interruption_notice=place).interruption_notice == "aws"
    assert "169.254.169.254/32" in allowed


def test_a_broker_of_the_users_own_is_left_alone() -> None:
    values = {**VALUES["existing"], "networkPolicy": {}, "monitoring": {"enabled": True}}

    names = {manifest["metadata"]["name"] for manifest in render(values)}
    assert "warren-worker" in names
    assert "warren-rabbitmq" not in names


def settings_of(text: str) -> dict[str, str]:
    lines = [line.partition("=") for line in text.splitlines() if line and line[0] != "#"]
    return {key.strip(): value.strip() for key, _, value in lines}
