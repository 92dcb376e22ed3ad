"""/admin/v1/tenants: what operators do with tenants."""

from collections.abc import Mapping

from fastapi import APIRouter, Path, Request, Response
from msgspec import Struct

from gateway.api.openapi import answered
from gateway.api.routes import json_response
from gateway.intake.keys.api_key import TENANT, ApiKey
from gateway.wiring import Gateway
from shared.errors import Conflict
from shared.telemetry import audit

_TENANT = Path(max_length=128, pattern=f"^{TENANT.pattern}$", description="The name of the tenant.")
_MAX_SHOWN = 5


class ErasedTenant(Struct, frozen=True, kw_only=True):
    tenant: str
    num_rows: Mapping[str, int]
    """Rows of the database that were deleted, by table. Each of `files` had bytes in the storage of
    files, which are deleted, too."""
    num_logs: int
    """Requests whose logs the broker was told to delete."""
    num_dead_letters: int
    """Dead letters that were dropped."""


def router(gateway: Gateway) -> APIRouter:
    routes = APIRouter(prefix="/admin/v1/tenants", tags=["operators"])

    @routes.delete("/{tenant}", openapi_extra={"responses": {"200": answered(ErasedTenant)}})
    async def erase_tenant(request: Request, tenant: str = _TENANT) -> Response:
        """Permanently delete all that is stored of a tenant, and cancel its work. Its API keys must
        be revoked before. An erasure that was interrupted is completed by the next one."""
        await gateway.key_directory.refresh()
        if key_ids := gateway.erasure.keys_of(tenant):
            raise Conflict(_still_has(tenant, key_ids))
        erased = await gateway.erasure.erase(tenant)
        answer = ErasedTenant(tenant=tenant, **erased._asdict())
        caller: ApiKey = request.state.caller
        fields = {"erased_tenant": tenant, **erased._asdict()}
        audit.record("tenant erased", tenant=caller.tenant, key_id=caller.key_id, **fields)
        return json_response(answer)

    return routes


def _still_has(tenant: str, key_ids: list[str]) -> str:
    shown = ", ".join(key_ids[:_MAX_SHOWN])
    more = f" and {len(key_ids) - _MAX_SHOWN} more" if len(key_ids) > _MAX_SHOWN else ""
    return f"The tenant {tenant} has API keys in force. Revoke them first: {shown}{more}."
