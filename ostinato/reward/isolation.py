"""Confines the process that runs reward functions, as far as this Linux allows it to an unprivileged process.

    namespaces    no network interfaces, every mount read-only except a temporary folder, only its own
                  processes in /proc (user_namespaces(7)); all of them end with the first one
    otherwise     seccomp(2) refuses all but Unix sockets, landlock(7) refuses writes elsewhere; started
                  processes are found as the descendants of a subreaper

    trainer -> keeper -+-> init (first of the process namespace; does nothing)
                       +-> the worker, confined: runs reward functions

All capabilities are dropped in either case, even root's. docs/security.md lists what this does not prevent.
Standard library only: every worker loads this file, and ``python isolation.py`` prints what works here.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

Mode = Literal["auto", "off", "strict"]

SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH|PRIVATE|COOKIE|WEBHOOK|(^|_)(PAT|PWD|DSN)(_|$)")
NO_SECRETS = frozenset({"PWD", "TOKENIZERS_PARALLELISM"})
LOGIN = re.compile(r"://[^/\s]*:[^/\s]*@")  # a password within an address

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 1 << 12, 1 << 14, 1 << 18
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE = 442, -100, 0x8000  # since Linux 5.12, same on every architecture
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP = 1, 4, 22
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38
CAPABILITIES_3 = 0x20080522
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
SHM = "/dev/shm"  # semaphores of multiprocessing
SOCKETS = ("/run/docker.sock", "/var/run/docker.sock")  # may be mounted from outside: /proc lists them not

LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
WRITE_FILE, TRUNCATE, IOCTL_DEV = 1 << 1, 1 << 14, 1 << 15
CHANGE = sum(1 << bit for bit in (*range(4, 14),)) | WRITE_FILE | TRUNCATE  # make, remove, move, link

AUDIT_ARCH = {"x86_64": (0xC000003E, 41), "aarch64": (0xC00000B7, 198)}  # and the number of socket(2)
IO_URING_SETUP, X32 = 425, 0x40000000  # both can open sockets without socket(2)
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | 13  # EACCES

WATCH_S = 0.5
ROUNDS = 10  # of searching for descendants, which may start more in the meantime


def drop_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` without variables that look like a secret, by name or as an address with a
    password."""
    return {
        name: value
        for name, value in environ.items()
        if name in NO_SECRETS or not (SECRET.search(name.upper()) or LOGIN.search(value))
    }


def find_means(folder: str) -> list[str]:
    """Return the means that work here: "namespaces", else those of "seccomp" and "landlock" that work; none
    off Linux. Each is tried in a child, so the process must have a single thread."""
    if sys.platform != "linux":
        return []
    if _can_confine(lambda: _try_namespaces(folder)):
        return ["namespaces"]
    candidates: dict[str, Callable[[], None]] = {
        "seccomp": _apply_seccomp,
        "landlock": lambda: _apply_landlock(folder),
    }
    return [name for name, confine in candidates.items() if _can_confine(confine)]


def list_gaps(used_means: Sequence[str]) -> list[str]:
    """Return, in words, what reward code can still do when confined by the means ``used_means``, if
    anything."""
    means_by_gap = {
        "use the network": {"namespaces", "seccomp"},
        "write outside of their temporary folder": {"namespaces", "landlock"},
    }
    open_gaps = [gap for gap, closed_by in means_by_gap.items() if not closed_by & set(used_means)]
    return open_gaps if sys.platform == "linux" else [*open_gaps, "leave processes behind"]


def refuse_gaps(gaps: Sequence[str]) -> None:
    """Raise ValueError if there are any gaps."""
    if gaps:
        raise ValueError(
            f'reward.isolation is "strict", but on this machine rewards can {" and ".join(gaps)}: this '
            'user has no user namespaces, nor seccomp and landlock; enable one of them or use "auto"'
        )


def enter_isolation(used_means: Sequence[str], folder: str, parent: int, close: Callable[[], None]) -> None:
    """Fork, and return in a new, confined process. The calling process does not return: as the keeper of the
    new process it exits with the status of that, deletes ``folder``, and kills the new process when
    ``parent`` is gone. ``close`` runs in all processes but the new one, which alone may keep the socket open.

    Linux only. The calling process must have a single thread. Raises OSError, in either process.
    """
    if "namespaces" in used_means:
        socket_paths = _list_unix_sockets()
        _enter_namespaces()
        if not os.fork():
            close()
            _wait_forever()
    _call_prctl(PR_SET_CHILD_SUBREAPER, 1)
    if worker_pid := os.fork():
        close()
        _keep_worker(worker_pid, folder, parent)
    _call_prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if "namespaces" in used_means:
        _make_mounts(folder, socket_paths)
    _drop_capabilities()
    if "landlock" in used_means:
        _apply_landlock(folder)
    if "seccomp" in used_means:
        _apply_seccomp()


def forbid_tracing() -> None:
    """Forbid this user's other processes to read or trace this process until it runs another program. A no-op
    off Linux."""
    if sys.platform == "linux":
        _call_prctl(PR_SET_DUMPABLE, 0)


def end_descendants(pid: int) -> None:
    """Kill all descendants of a process, also those that left its group. The process must be a subreaper.
    Descendants that are still being started after ROUNDS rounds, or may not be killed, go on."""
    for _ in range(ROUNDS):
        if not (pids := _find_descendants(pid)):
            return
        for descendant in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(descendant, signal.SIGKILL)


def describe_isolation() -> str:
    """Describe in a line the isolation that works on this machine, which is tried in a separate process."""
    command = [sys.executable, "-P", __file__]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if process.returncode:
        return f"unknown: {(process.stderr.strip().splitlines() or ['no output'])[-1]}"
    names = json.loads(process.stdout)
    text = " and ".join(names) or "cleaned environment alone"
    return (
        f"{text}; rewards can {' and '.join(gaps)}" if (gaps := list_gaps(names)) else f"complete, by {text}"
    )


# ---- processes


def _can_confine(confine: Callable[[], None]) -> bool:
    """Return whether ``confine`` raises nothing in a child process."""
    child = os.fork()
    if not child:
        try:
            confine()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def _wait_forever() -> None:
    """Wait forever, as the first process of the namespace. The kernel reaps the orphans that it adopts. It is
    killed with its parent."""
    _call_prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        signal.pause()


def _keep_worker(worker_pid: int, folder: str, parent_pid: int) -> None:
    """Wait until the worker has ended or ``parent_pid`` is gone. Then end all descendants, delete ``folder``,
    and exit with the worker's status or signal."""
    _call_prctl(PR_SET_DUMPABLE, 0)  # the worker cannot read or trace this process; no core dump
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    status = None
    while status is None and os.getppid() == parent_pid:
        with contextlib.suppress(ChildProcessError):
            while (exit_info := os.waitpid(-1, os.WNOHANG))[0]:
                status = exit_info[1] if exit_info[0] == worker_pid else status
        if status is None:
            signal.sigtimedwait([signal.SIGCHLD], WATCH_S)
    end_descendants(os.getpid())
    shutil.rmtree(folder, ignore_errors=True)
    if status is None:
        os.killpg(0, signal.SIGKILL)
    elif os.WIFSIGNALED(status):  # same signal: the trainer reports how its worker ended
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status or 0))


def _find_descendants(pid: int) -> list[int]:
    """Return the living descendants; a zombie is for its parent to reap."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if state not in "ZX":
                children.setdefault(int(parent), []).append(int(stat.parent.name))
    pids = list(children.get(pid, ()))
    for descendant in pids:  # the list grows during the loop
        pids += children.get(descendant, ())
    return pids


# ---- namespaces


def _try_namespaces(folder: str) -> None:
    """Try the full setup. The child that is forked is the first process of the namespace. Raises OSError."""
    socket_paths = _list_unix_sockets()
    _enter_namespaces()

    def confine() -> None:
        _make_mounts(folder, socket_paths)
        _drop_capabilities()

    if not _can_confine(confine):
        raise OSError("the mounts were refused")


def _enter_namespaces() -> None:
    """Enter new user, PID (of processes forked from now on), network and IPC namespaces."""
    uid, gid = os.geteuid(), os.getegid()
    _call_libc("unshare", CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        Path(f"/proc/self/{name}").write_text(text)


def _make_mounts(folder: str, socket_paths: Sequence[str]) -> None:
    """Make everything read-only and without devices. Excepted are ``folder`` and shared memory (both empty,
    in memory only) and the devices that every program expects. /dev/null covers the sockets."""
    _call_libc("unshare", CLONE_NEWNS)
    _mount("none", "/", "", MS_REC | MS_PRIVATE)
    devices = [device for device in DEVICES if os.path.exists(device)]
    for device in devices:
        _mount(device, device, "", MS_BIND)
    for name in filter(os.path.exists, socket_paths):
        _mount("/dev/null", name, "", MS_BIND)
    writable_places = [place for place in (folder, SHM) if os.path.isdir(place)]
    for place in writable_places:
        _mount("tmpfs", place, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0700")
    _set_attributes("/", AT_RECURSIVE, MS_RDONLY | MS_NOSUID | MS_NODEV, 0)
    for place in writable_places:
        _set_attributes(place, 0, 0, MS_RDONLY)
    for device in devices:
        _set_attributes(device, 0, 0, MS_NODEV)
    _mount("proc", "/proc", "proc", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC)


def _list_unix_sockets() -> list[str]:
    """Return the paths at which programs outside listen: a network namespace does not block these sockets."""
    names = []
    with contextlib.suppress(OSError):
        lines = Path("/proc/net/unix").read_text(errors="surrogateescape").splitlines()[1:]
        names = [line.split(None, 7)[7] for line in lines if len(line.split(None, 7)) == 8]
    return sorted({*SOCKETS, *(name for name in names if name.startswith("/"))})


def _mount(source: str, place: str, kind: str, flags: int, data: str = "") -> None:
    _call_libc("mount", *map(os.fsencode, (source, place, kind)), ctypes.c_ulong(flags), os.fsencode(data))


def _set_attributes(place: str, flags: int, set_flags: int, clear_flags: int) -> None:
    """Call mount_setattr(2), whose attributes have the same values as the first flags of mount(2)."""
    attributes = struct.pack("=QQQQ", set_flags, clear_flags, 0, 0)
    _call_system(MOUNT_SETATTR, AT_FDCWD, os.fsencode(place), flags, attributes, len(attributes))


def _drop_capabilities() -> None:
    """Drop all capabilities permanently: programs that are started by this process do not regain any."""
    _call_prctl(PR_SET_NO_NEW_PRIVS, 1)
    _call_libc("capset", struct.pack("=Ii", CAPABILITIES_3, 0), bytes(24))


# ---- without namespaces


def _apply_landlock(folder: str) -> None:
    """Allow writes only to ``folder`` and harmless devices, and, as far as this version can, no connection to
    abstract sockets and no signal to outside processes. Raises OSError."""
    version = _call_system(LANDLOCK_CREATE, None, 0, 1)
    if version < 3:
        raise OSError("this landlock does not keep files from being truncated")
    handled_rights = CHANGE | (IOCTL_DEV if version >= 5 else 0)
    scopes = 3 if version >= 6 else 0  # abstract Unix sockets, signals
    attributes = struct.pack("=QQQ", handled_rights, 0, scopes)[: 24 if version >= 6 else 8]
    ruleset = _call_system(LANDLOCK_CREATE, attributes, len(attributes), 0)
    for place in (folder, *filter(os.path.exists, DEVICES)):
        rights = handled_rights if place == folder else handled_rights & (WRITE_FILE | TRUNCATE | IOCTL_DEV)
        folder_fd = os.open(place, os.O_PATH | os.O_CLOEXEC)
        _call_system(LANDLOCK_ADD, ruleset, 1, struct.pack("=Qi", rights, folder_fd), 0)
        os.close(folder_fd)
    _call_prctl(PR_SET_NO_NEW_PRIVS, 1)
    _call_system(LANDLOCK_RESTRICT, ruleset, 0)
    os.close(ruleset)


def _apply_seccomp() -> None:
    """Refuse socket(2) except for AF_UNIX, and other calls that can open sockets. Raises OSError."""
    if platform.machine() not in AUDIT_ARCH:
        raise OSError(f"no filter is known for {platform.machine()}")
    arch, socket = AUDIT_ARCH[platform.machine()]
    load, equal, at_least, end = 0x20, 0x15, 0x35, 0x06  # of the classic Berkeley packet filter
    program = [  # (code, jump if true, jump if false, value)
        (load, 0, 0, 4),  # the architecture: 32-bit programs have other numbers
        (equal, 0, 6, arch),
        (load, 0, 0, 0),  # the number of the call
        (at_least, 4, 0, X32),
        (equal, 3, 0, IO_URING_SETUP),
        (equal, 0, 3, socket),
        (load, 0, 0, 16),  # its first argument
        (equal, 1, 0, 1),  # AF_UNIX
        (end, 0, 0, REFUSE),
        (end, 0, 0, ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in program))
    filters = struct.pack("@HP", len(program), ctypes.addressof(code))
    _call_prctl(PR_SET_NO_NEW_PRIVS, 1)
    _call_prctl(PR_SET_SECCOMP, 2, filters)


# ---- calls


def _call_libc(name: str, *arguments: object) -> int:
    """Call a function of libc. Raises OSError, as every system call in this file does."""
    return _check_result(getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments), name)


def _call_system(number: int, *arguments: object) -> int:
    longs = [ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments]
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    return _check_result(call(ctypes.c_long(number), *longs), f"system call {number}")


def _call_prctl(option: int, *arguments: int | bytes) -> None:
    longs = [
        ctypes.c_ulong(argument) if isinstance(argument, int) else argument
        for argument in (*arguments, 0, 0, 0, 0)[:4]
    ]
    _check_result(ctypes.CDLL(None, use_errno=True).prctl(option, *longs), f"prctl {option}")


def _check_result(result: int, call: str) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{call}: {os.strerror(ctypes.get_errno())}")
    return result


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="ostinato-") as tried_in:
        print(json.dumps(find_means(tried_in)))
