"""The Helm chart, rendered by Helm itself, whose Go library comes with a Python package."""

from pathlib import Path
from typing import Any

import helm_python
import yaml

CHART = Path(__file__).parents[3] / "infra" / "helm" / "warren"
NAMESPACE = "llm"
KEYS = {"apiKeys": {"existingSecret": "keys"}}
"""The only value without which the chart does not render."""

Manifest = dict[str, Any]


def render(values: dict[str, Any] | None = None, *, name: str = "warren") -> list[Manifest]:
    """The manifests of a release with these values beside `KEYS`. Raises `HelmError`."""
    chosen = {**KEYS, **(values or {})}
    with helm_python.Chart.load(CHART) as chart:
        chart.validate_schema(chosen)
        rendered = chart.render(chosen, name=name, namespace=NAMESPACE)
    return [
        manifest
        for path, text in rendered.items()
        if path.endswith(".yaml")
        for manifest in yaml.safe_load_all(text)
        if manifest
    ]


def find(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    (found,) = [
        manifest
        for manifest in manifests
        if (manifest["kind"], manifest["metadata"]["name"]) == (kind, name)
    ]
    return found


def container_of(deployment: Manifest) -> dict[str, Any]:
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    found: dict[str, Any] = container
    return found


def variables_of(deployment: Manifest) -> dict[str, str]:
    """The environment variables of a deployment's container that have a value."""
    return {one["name"]: one["value"] for one in container_of(deployment)["env"] if "value" in one}
