"""/v1/uploads: files that arrive in parts, in any order and several at once."""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Request, Response
from msgspec import Meta, Struct

from gateway.api.bodies.parsing import Body, parse, refused
from gateway.api.openapi import answered, documented, form
from gateway.api.routes import json_response
from gateway.api.routes.files import ExpiresAfter, FileObject, bytes_left, file_object, plain_name
from gateway.intake.admission import read_body
from gateway.intake.multipart import read_form
from gateway.intake.signer import hash_body
from gateway.store.files.uploads import MAX_PARTS, UploadRecord, UploadStatus
from gateway.store.state import StoredState
from gateway.wiring import Gateway
from shared.off_loop import off_loop
from shared.settings import DAY_S

MAX_PART_BYTES = 64 << 20
"""OpenAI's limit, and the size of the parts that its clients send."""
_EXAMPLE: Mapping[str, Any] = {
    "bytes": 1048576,
    "filename": "requests.jsonl",
    "mime_type": "application/jsonl",
    "purpose": "batch",
}
_COMPLETION_EXAMPLE: Mapping[str, Any] = {"part_ids": ["part_0123456789abcdef0123456789abcdef"]}
_UPLOAD_ID = Path(description="The `id` of the upload.")
_FORM = form(["data"], {"data": {"type": "string", "format": "binary"}})


class UploadOrder(Body, frozen=True, kw_only=True):
    """The body of ``POST /v1/uploads``."""

    bytes: Annotated[int, Meta(ge=0)]
    filename: Annotated[str, Meta(min_length=1)]
    mime_type: str
    purpose: Literal["batch"]
    expires_after: ExpiresAfter | None = None


class UploadCompletion(Body, frozen=True, kw_only=True):
    """The body of ``POST /v1/uploads/{upload_id}/complete``."""

    part_ids: Annotated[tuple[str, ...], Meta(max_length=MAX_PARTS)]
    md5: Annotated[str, Meta(pattern="^[0-9a-fA-F]{32}$")] | None = None


class Upload(Struct, frozen=True, kw_only=True, tag_field="object", tag="upload"):
    id: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: UploadStatus
    file: FileObject | None = None


class UploadPart(Struct, frozen=True, kw_only=True, tag_field="object", tag="upload.part"):
    id: str
    created_at: int
    upload_id: str


def router(gateway: Gateway) -> APIRouter:
    routes = APIRouter(tags=["uploads"])

    @routes.post(
        "/v1/uploads", openapi_extra=documented(UploadOrder, _EXAMPLE, Upload, streams=False)
    )
    async def create_upload(request: Request) -> Response:
        """Begin to upload a file in parts. The upload expires after an hour."""
        settings, tenant = gateway.settings, request.state.tenant
        with gateway.admission.admit_with_body(tenant) as entry:
            raw_body = await read_body(request, settings.max_body_bytes, entry)
            body = await off_loop(partial(parse, UploadOrder, raw_body), entry.num_bytes)
            state = await gateway.store.open()
            max_bytes = await bytes_left(gateway, state.files, tenant)
            if body.bytes > max_bytes:
                raise refused("bytes", f"expected at most {max_bytes}.")
            expiry = body.expires_after
            upload = await state.uploads.create(
                tenant,
                filename=plain_name(body.filename),
                purpose=body.purpose,
                num_bytes=body.bytes,
                kept_s=int(settings.retention_days.files * DAY_S)
                if expiry is None
                else expiry.seconds,
            )
        return await _described(state, upload)

    @routes.post(
        "/v1/uploads/{upload_id}/parts",
        openapi_extra={**_FORM, "responses": {"200": answered(UploadPart)}},
    )
    async def add_part(request: Request, upload_id: str = _UPLOAD_ID) -> Response:
        """Add a part of up to 64 MiB. Its bytes go to the storage as they arrive."""
        tenant = request.state.tenant
        with gateway.admission.admit_with_body(tenant):
            state = await gateway.store.open()
            left = await bytes_left(gateway, state.files, tenant)
            async with state.uploads.writing_part(tenant, upload_id) as draft:

                async def take(_: str, data: bytes) -> None:
                    await draft.write(data)

                await read_form(request, min(MAX_PART_BYTES, left), take, "data")
        return json_response(
            UploadPart(id=draft.id, created_at=draft.created_at, upload_id=upload_id)
        )

    @routes.post(
        "/v1/uploads/{upload_id}/complete",
        openapi_extra=documented(UploadCompletion, _COMPLETION_EXAMPLE, Upload, streams=False),
    )
    async def complete_upload(request: Request, upload_id: str = _UPLOAD_ID) -> Response:
        """Make a file of the parts, in the order of `part_ids`."""
        tenant = request.state.tenant
        with gateway.admission.admit_with_body(tenant) as entry:
            raw_body = await read_body(request, gateway.settings.max_body_bytes, entry)
            body = await off_loop(partial(parse, UploadCompletion, raw_body), entry.num_bytes)
            state = await gateway.store.open()
            upload = await state.uploads.complete(
                tenant, upload_id, body.part_ids, md5=body.md5, body_hash=hash_body(raw_body)
            )
        return await _described(state, upload)

    @routes.post(
        "/v1/uploads/{upload_id}/cancel", openapi_extra={"responses": {"200": answered(Upload)}}
    )
    async def cancel_upload(request: Request, upload_id: str = _UPLOAD_ID) -> Response:
        """Cancel an upload. Its parts are deleted."""
        state = await gateway.store.open()
        return await _described(state, await state.uploads.cancel(request.state.tenant, upload_id))

    return routes


async def _described(state: StoredState, upload: UploadRecord) -> Response:
    file = None
    if upload.file_id is not None:
        file = file_object(await state.files.get(upload.tenant, upload.file_id))
    return json_response(
        Upload(
            id=upload.id,
            bytes=upload.num_bytes,
            created_at=upload.created_at,
            expires_at=upload.expires_at,
            filename=upload.filename,
            purpose=upload.purpose,
            status=upload.status,
            file=file,
        )
    )
