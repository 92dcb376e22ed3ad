"""GET /openapi.json, and GET /docs: a page that shows this document and sends requests, without
Internet access."""

from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse, Response
from fastapi.staticfiles import StaticFiles

from gateway.api.openapi import DocumentedAPI

_DOCUMENT = "/openapi.json"
_PAGE = "/docs"
_ASSETS = f"{_PAGE}/assets"
# Swagger UI is started by a script in the page, and draws with inline styles and data: images.
_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; frame-ancestors 'none'"
)


def install(app: DocumentedAPI) -> None:
    """Serve the document and the page, whose scripts and styles come from a package."""
    app.mount(_ASSETS, StaticFiles(packages=[("fastapi_offline", "static")]))

    @app.get(_DOCUMENT, include_in_schema=False)
    async def show_document() -> Response:
        return Response(await app.encoded(), media_type="application/json")

    @app.get(_PAGE, include_in_schema=False)
    async def show_docs() -> HTMLResponse:
        page = get_swagger_ui_html(
            openapi_url=_DOCUMENT,
            title=app.title,
            swagger_js_url=f"{_ASSETS}/swagger-ui-bundle.js",
            swagger_css_url=f"{_ASSETS}/swagger-ui.css",
            swagger_favicon_url=f"{_ASSETS}/favicon.png",
            swagger_ui_parameters={"validatorUrl": None},  # a service on the Internet
        )
        page.headers["Content-Security-Policy"] = _POLICY
        return page
