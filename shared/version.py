"""The version of this installation, which follows from the tags of git (`VERSION`)."""

from importlib import metadata

UNKNOWN = "unknown"
"""The version of sources that run without having been installed."""


def _installed() -> str:
    try:
        return metadata.version("warren")
    except metadata.PackageNotFoundError:
        return UNKNOWN


VERSION = _installed()
