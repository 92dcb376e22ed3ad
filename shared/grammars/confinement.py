"""Takes from a process what it does not need: files, the network, other processes and privileges.

Linux lets every process restrict its own system calls (seccomp), in containers, too.
"""

import ctypes
import errno
import os
import struct
from collections.abc import Mapping

_SET_SECCOMP, _MODE_FILTER = 22, 2
_SET_NO_NEW_PRIVILEGES = 38
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
_LOAD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_NUMBER_AT, _ARCHITECTURE_AT = 0, 4
_INSTRUCTION = struct.Struct("HBBI")

_CALLS: Mapping[str, tuple[int, Mapping[str, int]]] = {
    "x86_64": (
        0xC000003E,
        {
            "read": 0, "write": 1, "close": 3, "fstat": 5, "poll": 7, "lseek": 8, "mmap": 9,
            "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14,
            "rt_sigreturn": 15, "sched_yield": 24, "mremap": 25, "madvise": 28, "setitimer": 38,
            "getpid": 39, "exit": 60, "gettimeofday": 96, "sigaltstack": 131, "gettid": 186,
            "futex": 202, "sched_getaffinity": 204, "clock_gettime": 228, "exit_group": 231,
            "getrandom": 318, "rseq": 334,
        },
    ),
    "aarch64": (
        0xC00000B7,
        {
            "close": 57, "lseek": 62, "read": 63, "write": 64, "ppoll": 73, "fstat": 80,
            "exit": 93, "exit_group": 94, "futex": 98, "setitimer": 103, "clock_gettime": 113,
            "sched_getaffinity": 123, "sched_yield": 124, "sigaltstack": 132, "rt_sigaction": 134,
            "rt_sigprocmask": 135, "rt_sigreturn": 139, "gettimeofday": 169, "getpid": 172,
            "gettid": 178, "brk": 214, "munmap": 215, "mremap": 216, "mmap": 222, "mprotect": 226,
            "madvise": 233, "getrandom": 278, "rseq": 293,
        },
    ),
}  # fmt: skip
"""The number of each architecture in a filter, and its calls that remain: memory, the open files,
timers and the end of the process."""


class _Program(ctypes.Structure):
    """The kernel's ``struct sock_fprog``."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def confine() -> None:
    """Refuse all other system calls from now on. Modules must be imported before. Raises
    `OSError`, also on other architectures."""
    machine = os.uname().machine
    if machine not in _CALLS:
        raise OSError(errno.ENOSYS, f"no list of system calls for {machine}")
    code = _filter(*_CALLS[machine])
    program = _Program(len(code) // _INSTRUCTION.size, code)
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)
    address = ctypes.addressof(program)
    for arguments in (
        (_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0),
        (_SET_SECCOMP, _MODE_FILTER, address, 0, 0),
    ):
        if prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _filter(architecture: int, calls: Mapping[str, int]) -> bytes:
    """A program of the kernel's packet filter, in which each call that remains is compared."""
    numbers = sorted(calls.values())
    refuse = len(numbers)  # instructions from the first comparison
    code = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_IF_EQUAL, 0, refuse + 1, architecture),
        (_LOAD, 0, 0, _NUMBER_AT),
        *((_IF_EQUAL, refuse - k, 0, number) for k, number in enumerate(numbers)),
        (_RETURN, 0, 0, _REFUSE),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(_INSTRUCTION.pack(*instruction) for instruction in code)
