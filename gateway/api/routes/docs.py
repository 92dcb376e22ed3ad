"""GET /docs: a page that shows the OpenAPI document and sends requests, without Internet access."""

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse
from fastapi.staticfiles import StaticFiles

_PAGE = "/docs"
_ASSETS = f"{_PAGE}/assets"
# Swagger UI is started by a script in the page, and draws with inline styles and data: images.
_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; frame-ancestors 'none'"
)


def install(app: FastAPI) -> None:
    """Serve the page, and its scripts and styles from the package that contains them."""
    document = app.openapi_url
    assert document is not None
    app.mount(_ASSETS, StaticFiles(packages=[("fastapi_offline", "static")]))

    @app.get(_PAGE, include_in_schema=False)
    async def show_docs() -> HTMLResponse:
        page = get_swagger_ui_html(
            openapi_url=document,
            title=app.title,
            swagger_js_url=f"{_ASSETS}/swagger-ui-bundle.js",
            swagger_css_url=f"{_ASSETS}/swagger-ui.css",
            swagger_favicon_url=f"{_ASSETS}/favicon.png",
            swagger_ui_parameters={"validatorUrl": None},  # a service on the Internet
        )
        page.headers["Content-Security-Policy"] = _POLICY
        return page
