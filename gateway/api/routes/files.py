"""/v1/files: files that batches read and write."""

import re
import time
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Literal
from urllib.parse import quote

from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.responses import StreamingResponse
from msgspec import Meta, Struct
from starlette.exceptions import HTTPException

from gateway.api.openapi import answered, form
from gateway.api.routes import json_response
from gateway.api.routes.generation import admitted
from gateway.intake.multipart import read_form
from gateway.store.files.records import Draft, FileRecord, Files, not_found
from gateway.wiring import Gateway
from shared.errors import InvalidRequest
from shared.settings import DAY_S

MIN_EXPIRY_S, MAX_EXPIRY_S = 3600, 30 * 24 * 3600
"""OpenAI's limits of ``expires_after``."""
_MAX_LISTED = 10_000
_MAX_NAME_CHARS = 512
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")
_UNFIT = re.compile(r"[\x00-\x1f\x7f/\\]")
_FILE_ID = Path(description="The `id` of the file.")
_FORM = form(
    ["file", "purpose"],
    {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": ["batch"]},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {
            "type": "integer",
            "minimum": MIN_EXPIRY_S,
            "maximum": MAX_EXPIRY_S,
        },
    },
)


class ExpiresAfter(Struct, frozen=True, kw_only=True):
    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=MIN_EXPIRY_S, le=MAX_EXPIRY_S)]


class FileObject(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="object", tag="file"
):
    id: str
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"] = "processed"
    status_details: None = None


class FileList(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="object", tag="list"
):
    data: Sequence[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="object", tag="file"
):
    id: str
    deleted: bool = True


def router(gateway: Gateway) -> APIRouter:
    routes = APIRouter(tags=["files"])

    @routes.post("/v1/files", openapi_extra={**_FORM, "responses": {"200": answered(FileObject)}})
    async def create_file(request: Request) -> Response:
        """Upload a file. Its bytes go to the storage as they arrive."""
        settings, tenant = gateway.settings, request.state.tenant
        with gateway.admission.admit_with_body(tenant):
            state = await gateway.store.open()
            left = await bytes_left(gateway, state.files, tenant)
            async with state.files.writing(tenant) as draft:

                async def take(filename: str, data: bytes) -> None:
                    draft.filename = plain_name(filename)
                    await draft.write(data)

                fields = await read_form(request, left, take)
                _complete(draft, fields, settings.retention_days.files * DAY_S)
        return json_response(file_object(draft.record))

    @routes.get("/v1/files", openapi_extra={"responses": {"200": answered(FileList)}})
    async def list_files(
        purpose: str | None = Query(None, description="List only files with this purpose."),
        limit: int = Query(_MAX_LISTED, ge=1, le=_MAX_LISTED, description="The size of a page."),
        order: Literal["asc", "desc"] = Query("desc", description="By `created_at`."),
        after: str | None = Query(None, description="The id after which the page begins."),
    ) -> Response:
        """List files."""

        async def answer(request: Request) -> Response:
            state = await gateway.store.open()
            found = await state.files.page(
                request.state.tenant,
                purpose=purpose,
                after=after,
                limit=limit + 1,
                newest_first=order == "desc",
            )
            page = [file_object(file) for file in found[:limit]]
            return json_response(
                FileList(
                    data=page,
                    first_id=page[0].id if page else None,
                    last_id=page[-1].id if page else None,
                    has_more=len(found) > limit,
                )
            )

        return admitted(gateway, answer)

    @routes.get("/v1/files/{file_id}", openapi_extra={"responses": {"200": answered(FileObject)}})
    async def get_file(request: Request, file_id: str = _FILE_ID) -> Response:
        """Describe a file."""
        state = await gateway.store.open()
        return json_response(file_object(await state.files.get(request.state.tenant, file_id)))

    @routes.get(
        "/v1/files/{file_id}/content",
        response_class=Response,
        responses={
            200: {"content": {"application/octet-stream": {}}, "description": "The bytes."},
            206: {"content": {"application/octet-stream": {}}, "description": "The range."},
            416: {"description": "The range begins after the end of the file."},
        },
    )
    async def get_content(file_id: str = _FILE_ID) -> Response:
        """Download a file, or the range of it that the header `Range` names."""

        async def answer(request: Request) -> Response:
            state = await gateway.store.open()
            file = await state.files.get(request.state.tenant, file_id)
            return await _content(state.files, file, request.headers.get("range"))

        return admitted(gateway, answer)

    @routes.delete(
        "/v1/files/{file_id}", openapi_extra={"responses": {"200": answered(DeletedFile)}}
    )
    async def delete_file(request: Request, file_id: str = _FILE_ID) -> Response:
        """Delete a file."""
        state = await gateway.store.open()
        await state.files.delete(request.state.tenant, file_id)
        return json_response(DeletedFile(id=file_id))

    return routes


def _complete(draft: Draft, fields: dict[str, str], retention_s: float) -> None:
    """Apply the fields of the form. Raises `InvalidRequest`."""
    draft.purpose = fields.get("purpose", "")
    if draft.purpose != "batch":
        raise InvalidRequest("purpose: expected batch.", param="purpose")
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    kept_s = retention_s
    if anchor is not None or seconds is not None:
        if anchor != "created_at":
            raise InvalidRequest(
                "expires_after.anchor: expected created_at.", param="expires_after"
            )
        is_number = seconds is not None and seconds.isascii() and seconds.isdecimal()
        kept_s = int(seconds or 0) if is_number and len(seconds or "") < 9 else 0
        if not MIN_EXPIRY_S <= kept_s <= MAX_EXPIRY_S:
            message = f"expires_after.seconds: expected {MIN_EXPIRY_S} to {MAX_EXPIRY_S}."
            raise InvalidRequest(message, param="expires_after")
    draft.expires_at = int(time.time() + kept_s)


async def bytes_left(gateway: Gateway, files: Files, tenant: str) -> int:
    """How large the next file of a tenant may be. Raises HTTPException 413 if it may have none."""
    try:
        left = await files.bytes_left(tenant)
    except InvalidRequest as error:
        raise HTTPException(413, error.message) from None
    return min(left, gateway.settings.max_file_bytes)


def plain_name(filename: str) -> str:
    """A name that is no path."""
    return _UNFIT.sub("_", filename[:_MAX_NAME_CHARS])


def file_object(file: FileRecord) -> FileObject:
    return FileObject(
        id=file.id,
        bytes=file.num_bytes,
        created_at=file.created_at,
        expires_at=file.expires_at,
        filename=file.filename,
        purpose="batch" if file.purpose == "batch" else "batch_output",
    )


async def _content(files: Files, file: FileRecord, range_header: str | None) -> Response:
    """Raises `NotFound` and HTTPException 416."""
    start, end, status = _range(range_header, file.num_bytes)
    headers = {
        "accept-ranges": "bytes",
        "content-length": str(end - start),
        "content-disposition": f"attachment; filename*=UTF-8''{quote(file.filename)}",
        "x-content-type-options": "nosniff",
    }
    if status == 206:
        headers["content-range"] = f"bytes {start}-{end - 1}/{file.num_bytes}"
    try:
        parts = await _begun(files.content(file.id, start, end))
    except FileNotFoundError:
        raise not_found(file.id) from None
    return StreamingResponse(parts, status, headers, media_type="application/octet-stream")


def _range(header: str | None, num_bytes: int) -> tuple[int, int, int]:
    """Start, end and status of a response. Any other header than a single range is ignored, as HTTP
    demands. Raises HTTPException 416."""
    match = _RANGE.fullmatch(header or "")
    if match is None or not any(match.groups()):
        return 0, num_bytes, 200
    first, last = match.groups()
    if first:
        start, end = int(first), min(int(last) + 1, num_bytes) if last else num_bytes
        if last and int(last) < start:
            return 0, num_bytes, 200
    else:
        start, end = max(0, num_bytes - int(last)), num_bytes
    if start >= num_bytes or start >= end:
        headers = {"content-range": f"bytes */{num_bytes}"}
        raise HTTPException(416, "The range begins after the end of the file.", headers)
    return start, end, 206


async def _begun(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The same parts. The first part is read at once, so that its errors still set the status. The
    response ends early if the file is deleted."""
    first = await anext(parts, b"")

    async def all_parts() -> AsyncIterator[bytes]:
        yield first
        try:
            async for part in parts:
                yield part
        except FileNotFoundError:  # deleted meanwhile
            raise ConnectionAbortedError from None

    return all_parts()
