"""Ties a process's life to its parent's through the kernel (Linux parent-death signal).

Invariant: after `die_with_parent` returned, the death of the parent, even by SIGKILL, kills this process; a parent
that died before the call is noticed by the call. The kernel watches the *thread* that forked, so an owner must start
its children from a thread that lives as long as itself.
"""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent_pid: int | None = None) -> None:
    """Ask for SIGKILL when the parent dies; exits at once if `parent_pid` is given and is the parent no more.

    Safe between fork and exec: no allocation beyond what ctypes needs, no locks. Survives exec.
    """
    if _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if parent_pid is not None and os.getppid() != parent_pid:
        os._exit(1)
