"""Standard input, output and error as every command may rely on them."""

import os
import sys
from io import TextIOWrapper

_MODES = {"stdin": "r", "stdout": "w", "stderr": "w"}


def prepare() -> None:
    """Open the standard streams that the parent process has closed, and let the others take all
    text, whatever their encoding.

    Call this before any module opens a file: the file would become standard output, and libuv
    aborts if it closes a descriptor below 3. A character that the encoding lacks is written as an
    escape such as ``\\u2501``. Input that was declared as ASCII is read as UTF-8.
    """
    for descriptor, (name, mode) in enumerate(_MODES.items()):
        stream = getattr(sys, name)
        if stream is None:
            _open(descriptor, mode)
            setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8"))
        elif isinstance(stream, TextIOWrapper):
            _widen(stream, mode)


def _open(descriptor: int, mode: str) -> None:
    opened = os.open(os.devnull, os.O_RDONLY if mode == "r" else os.O_WRONLY)
    if opened != descriptor:
        os.dup2(opened, descriptor)
        os.close(opened)
    os.set_inheritable(descriptor, True)


def _widen(stream: TextIOWrapper, mode: str) -> None:
    if mode == "w":
        stream.reconfigure(errors="backslashreplace")
    else:
        is_ascii = stream.encoding.lower() in ("ascii", "ansi_x3.4-1968", "us-ascii")
        stream.reconfigure(encoding="utf-8" if is_ascii else None, errors="replace")
