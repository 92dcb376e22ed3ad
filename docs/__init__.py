"""The documentation. `docs.site` builds and generates it."""
