"""The compatibility tables: what Warren does with each parameter of each operation.

`docs.site.endpoints` has the parameters of other APIs, and ours come from the OpenAPI document. The
structs that read the bodies show which parameters are refused.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import msgspec

from docs.site.endpoints import ENDPOINTS, LLAMA_CPP, NOTES, VLLM, Endpoint
from gateway.api.bodies.schemas import GenerationRequest
from gateway.app import create_app
from shared import settings
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.errors import InvalidRequest
from shared.messages import SamplingParams
from shared.settings import GatewaySettings

_UNUSED = {"user"}
"""What the schemas read, and nothing else does."""
_REFUSED_HERE: Mapping[str, str] = {
    "audio": "Text only",
}
_FORM = "multipart/form-data"


@cache
def operations() -> dict[str, dict[str, Any]]:
    """The operations of the OpenAPI document, by method and path."""
    document = create_app(settings.load(GatewaySettings), MemoryBus(MemoryBroker())).openapi()
    return {
        f"{method.upper()} {path}": operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }


def parameters(operation: str) -> dict[str, str]:
    """Our parameters of an operation, of its query and of its body, each with its description."""
    described = operations()[operation]
    bodies = described.get("requestBody", {}).get("content", {}).values()
    fields = [
        (name.partition("[")[0], schema)
        for body in bodies
        for name, schema in body["schema"]["properties"].items()
    ]
    queries = [one for one in described.get("parameters", ()) if one["in"] == "query"]
    found = {name: _sentence(schema) for name, schema in fields}
    return found | {one["name"]: _sentence(one) for one in queries}


def tables() -> str:
    """A list of the operations, and a section with a table for each that has parameters."""
    sections = ["\n".join(_section(endpoint)) for endpoint in ENDPOINTS if _names(endpoint)]
    return "\n\n".join(["\n".join(_overview()), *sections])


def _overview() -> Iterator[str]:
    yield "## Operations"
    yield ""
    yield "| Operation | From | Purpose |"
    yield "|---|---|---|"
    for endpoint in ENDPOINTS:
        place = f"`{endpoint.operation}`"
        if _names(endpoint):
            place = f"[{place}](#{_anchor(endpoint.operation)})"
        purpose = operations()[endpoint.operation]["description"].split(". ")[0]
        yield f"| {place} | {endpoint.api} | {_cell(purpose).removesuffix('.')} |"


def _anchor(title: str) -> str:
    """Of a heading, as the site's Markdown names it."""
    kept = "".join(char for char in title.lower() if char.isalnum() or char in "_- ")
    return "-".join(kept.split())


def _section(endpoint: Endpoint) -> Iterator[str]:
    yield f"## {endpoint.operation}"
    yield ""
    yield "| Parameter | From | Warren | Notes |"
    yield "|---|---|---|---|"
    for name in sorted(_names(endpoint)):
        verdict = " | ".join(_verdict(endpoint, name))
        yield f"| `{name}` | {_origin(endpoint, name)} | {verdict} |"


def _names(endpoint: Endpoint) -> set[str]:
    body = endpoint.body
    refused = () if body is None else (*body.neutral, *body.renamed)
    return {*endpoint.origins, *parameters(endpoint.operation), *refused}


def _origin(endpoint: Endpoint, name: str) -> str:
    """The API that has a parameter, if only for another operation."""
    if name in endpoint.origins:
        return endpoint.origins[name]
    body = endpoint.body
    if body is None or not (name in body.neutral or name in body.renamed):
        return "vLLM" if name in VLLM else "Warren"
    if name in LLAMA_CPP:
        return "llama.cpp"
    elsewhere = (one.origins[name] for one in ENDPOINTS if name in one.origins)
    return next(elsewhere, endpoint.api if name in body.neutral else "Warren")


def _verdict(endpoint: Endpoint, name: str) -> tuple[str, str]:
    """What happens to a parameter, and what else there is to know of it."""
    if name in _UNUSED:
        return "ignored", ""
    if endpoint.body is not None:
        try:
            endpoint.body.check_names({name: "x"})
        except InvalidRequest:
            called = {old: f"Called `{ours}`" for old, ours in endpoint.body.renamed.items()}
            notes = {**_REFUSED_HERE, **endpoint.notes, **called}
            return "refused", notes.get(name, "400, except for its neutral value")
    ours = parameters(endpoint.operation)
    has_effect = endpoint.in_effect is None or name in endpoint.in_effect
    has_effect &= name not in endpoint.without_effect
    if name not in ours or not has_effect:
        return "ignored", endpoint.notes.get(name, "") if has_effect else ""
    is_generation = endpoint.body is not None and issubclass(endpoint.body, GenerationRequest)
    note = {**ours, **(NOTES if is_generation else {}), **endpoint.notes}[name]
    return "supported", "; ".join(filter(None, [_limits(name), note]))


def _sentence(described: Mapping[str, Any]) -> str:
    return _cell(described.get("description", "")).removesuffix(".")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _limits(name: str) -> str:
    """The range of a number, from the schema of the sampling parameters."""
    schemas = msgspec.json.schema(SamplingParams)["$defs"]["SamplingParams"]["properties"]
    schema = schemas.get(name, {})
    low, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    high = schema.get("maximum")
    if schema.get("type") != "number" or high is None:
        return ""
    start = f"{low:g} to" if low is not None else f"above {above:g}, up to"
    return f"{start} {high:g}"
