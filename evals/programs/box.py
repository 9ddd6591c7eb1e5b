"""The box in which one program is judged: a process of its own, `python box.py`, on the standard library alone.

A job comes as JSON on standard input, and the outcome goes as JSON to standard output. Three processes take part:

    outside     makes the namespaces, and waits; whoever ends it ends everything
    keeper      process 1 of the new PID namespace: builds the file system, watches the clock, memory and the number
                of processes, and judges; when it ends, the kernel ends everything in the namespace
    program     `program.py`, without privileges, in a session of its own

The file system holds the interpreter, its libraries and the installed packages, read-only, and one empty folder in
memory. The old one is not hidden but gone: nothing that is not named in the job can be read. There is no /proc, no
network interface that is up, and no process to be seen but the program's own.
"""

import contextlib
import ctypes
import functools
import json
import os
import random
import resource
import select
import signal
import stat
import subprocess
import sys
import time
from typing import Any

WORK = "/var/program"
SETUP = "/tmp"  # where the new root is put together; any folder will do, only this process sees it
DEVICES = ("null", "zero", "full", "random", "urandom")
OPEN_FILES, LONGEST_MESSAGE, WATCHED_EVERY = 64, 4096, 0.02

# From linux/sched.h, linux/mount.h and linux/prctl.h; mount_setattr has this number on every architecture but Alpha.
NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
NOSUID, NODEV, NOEXEC, BIND, RECURSIVE, PRIVATE, DETACH = 2, 4, 8, 0x1000, 0x4000, 0x40000, 2
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, ATTR_READ_ONLY = 442, -100, 0x8000, 1 | 2 | 4  # and neither set-uid nor devices
PARENT_DEATH_SIGNAL, NO_NEW_PRIVILEGES, SUBREAPER = 1, 38, 36

libc = ctypes.CDLL(None, use_errno=True)


class Refused(Exception):
    """A part of the box could not be had."""


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # process 1 gets only the signals that it handles
    job = json.load(sys.stdin.buffer)
    try:
        if job["unsafe"]:
            if sys.platform == "linux":
                die_with_parent()
                call("prctl", SUBREAPER, 1)  # what the program leaves behind becomes a child of this process
            tell(judge(job, job["folder"], None, None))
            return
        die_with_parent()
        user = separate()
        if keeper := os.fork():
            _, status = os.waitpid(keeper, 0)
            if os.WIFSIGNALED(status):
                tell(failed("its box was ended"))
            return
        die_with_parent()
        tell(judge(job, WORK, build(job), user))
        os._exit(0)
    except Refused as error:
        tell({"refused": str(error)})


def tell(outcome: dict[str, Any]) -> None:
    print(json.dumps(outcome), flush=True)


def failed(reason: str, seconds: float = 0.0) -> dict[str, Any]:
    return {"passed": False, "reason": reason, "seconds": seconds}


def call(name: str, *arguments: Any, number: int | None = None) -> None:
    """A function of the C library that answers 0, or a system call by its number.

    Raises:
        Refused: when it fails.
    """
    values = [a.encode() if isinstance(a, str) else a for a in arguments]
    if (libc.syscall(number, *values) if number else getattr(libc, name)(*values)) != 0:
        raise Refused(f"{name}: {os.strerror(ctypes.get_errno())}")


def die_with_parent() -> None:
    call("prctl", PARENT_DEATH_SIGNAL, signal.SIGKILL)


def separate() -> int | None:
    """Leaves the namespaces of the machine; the next child is process 1 of a new one.

    Returns:
        The user that the program is to run as: one that nobody is, of its own so that its processes are counted alone.
        None without the right to become another; the program is then the same user in a user namespace of its own.
    """
    with contextlib.suppress(Refused):
        if knows_all_users():
            call("unshare", NEWNS | NEWUTS | NEWIPC | NEWPID | NEWNET)
            return 0x10000000 + random.SystemRandom().randrange(0x10000000)
    user, group = os.geteuid(), os.getegid()
    call("unshare", NEWUSER | NEWNS | NEWUTS | NEWIPC | NEWPID | NEWNET)
    for name, text in (("setgroups", "deny"), ("uid_map", f"1000 {user} 1"), ("gid_map", f"1000 {group} 1")):
        try:
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        except OSError as error:
            raise Refused(f"{name}: {error.strerror}") from None
    return None


def knows_all_users() -> bool:
    """Whether this is no user namespace already, in which most numbers of users stand for nobody."""
    with open("/proc/self/uid_map") as file:
        return file.read().split() == ["0", "0", str(2**32 - 1)]


def build(job: dict[str, Any]) -> int:
    """Puts the new file system together and moves into it.

    Returns:
        A descriptor of the namespace's /proc, which has no place in the file system.
    """
    os.umask(0o022)
    call("mount", None, "/", None, RECURSIVE | PRIVATE, None)
    call("mount", "tmpfs", SETUP, "tmpfs", NOSUID | NODEV, "size=1m,mode=755")
    os.chdir(SETUP)
    os.mkdir("old")
    call("pivot_root", ".", "old", number=pivot_root_number())
    os.chdir("/")
    held: list[str] = []
    for path in sorted(job["readable"], key=len):
        if not any(path.startswith(f"{other}/") for other in held):
            held.append(path)
            show(path)
    for name in DEVICES:
        show(f"/dev/{name}", device=True)
    for name in (WORK, "/proc"):
        os.makedirs(name)
    call("mount", "tmpfs", WORK, "tmpfs", NOSUID | NODEV | NOEXEC, f"size={job['files']},nr_inodes=1000,mode=777")
    for name in ("/tmp", "/dev/shm"):
        if not os.path.exists(name):  # packages may lie under /tmp
            os.symlink(WORK, name)
    call("mount", "proc", "/proc", "proc", NOSUID | NODEV | NOEXEC, None)
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    call("umount2", "/proc", DETACH)
    call("umount2", "/old", DETACH)
    os.rmdir("/old")
    read_only("/", 0)
    return proc


def pivot_root_number() -> int:
    numbers = {"x86_64": 155, "aarch64": 41, "riscv64": 41, "ppc64le": 203, "s390x": 217}
    if (machine := os.uname().machine) not in numbers:
        raise Refused(f"pivot_root is not known for {machine}")
    return numbers[machine]


def show(path: str, device: bool = False) -> None:
    """Lets a path of the old file system be seen in the new one, at the same place."""
    old = f"/old{path}"
    if not os.path.lexists(old):
        return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.islink(old):
        os.symlink(os.readlink(old), path)
        return
    if os.path.isdir(old):
        os.mkdir(path)
    else:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
    call("mount", old, path, None, BIND | RECURSIVE, None)
    if not device:
        read_only(path, AT_RECURSIVE)


def read_only(path: str, flags: int) -> None:
    attributes = (ctypes.c_uint64 * 4)(ATTR_READ_ONLY, 0, 0, 0)
    size = ctypes.sizeof(attributes)
    call("mount_setattr", AT_FDCWD, path, flags, ctypes.byref(attributes), size, number=MOUNT_SETATTR)


def judge(job: dict[str, Any], folder: str, proc: int | None, user: int | None) -> dict[str, Any]:
    """Runs the program until it ends or has had enough, ends all that it started, and says what came of it.

    It has passed if, and only if, the token came back: `program.py` sends it once the code has run to its end.

    Raises:
        Refused: when it cannot be started.
    """
    token = os.urandom(16).hex().encode()
    answers, verdict = os.pipe()
    started = time.monotonic()
    program = start(job, folder, verdict, user)
    os.close(verdict)
    message, excess, status = b"", "", None
    try:
        with contextlib.suppress(BrokenPipeError), program.stdin as pipe:  # type: ignore[union-attr]
            pipe.write(token + b"\n" + job["code"].encode("utf-8", "surrogatepass"))
        while status is None and not excess:
            message = received(answers, message, WATCHED_EVERY)
            status = reaped(program.pid)
            if status is None:
                excess = too_much(job, time.monotonic() - started, proc)
    except OSError as error:  # which a program of the same user may have brought about
        excess = f"its box broke ({error})"
    seconds = time.monotonic() - started
    end_all(program.pid, confined=proc is not None)
    if excess:
        return failed(excess, seconds)
    message = received(answers, message, 0)
    if status == 0 and message == token:
        return {"passed": True, "reason": "", "seconds": seconds}
    return failed(told(status, message), seconds)


def start(job: dict[str, Any], folder: str, verdict: int, user: int | None) -> subprocess.Popen[bytes]:
    who: dict[str, Any] = {} if user is None else {"user": user, "group": user, "extra_groups": []}
    try:
        return subprocess.Popen(
            [*job["python"], "-c", job["harness"], str(verdict), *job["packages"]],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env=job["environment"] | {"HOME": folder, "TMPDIR": folder},
            pass_fds=(verdict,),
            start_new_session=True,
            preexec_fn=functools.partial(limit, job, shared=user is None),
            **who,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise Refused(f"the interpreter does not start: {error}") from None


def limit(job: dict[str, Any], shared: bool) -> None:
    """The limits of every process of the program; where it shares its user with this box, that has two of its own."""
    seconds = int(job["seconds"]) + 1
    limits = {
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_AS: job["memory"],
        resource.RLIMIT_FSIZE: job["files"],
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    if not job["unsafe"]:  # outside, all processes of the user would count
        limits[resource.RLIMIT_NPROC] = job["processes"] + 2 * shared
    for which, most in limits.items():
        with contextlib.suppress(ValueError, OSError):  # macOS knows no RLIMIT_AS; a lower hard limit stays
            resource.setrlimit(which, (most, most))
    if sys.platform == "linux":
        call("prctl", NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        die_with_parent()


def received(answers: int, message: bytes, wait: float) -> bytes:
    """The message with what the program has sent since, for which this waits. Too much of it is dropped."""
    if select.select([answers], [], [], wait)[0]:
        if more := os.read(answers, LONGEST_MESSAGE):
            return (message + more)[:LONGEST_MESSAGE]
        time.sleep(wait)  # it has closed its end
    return message


def reaped(program: int) -> int | None:
    """Takes leave of processes that ended, orphans among them; the program's status once it is one of them."""
    for _ in range(100):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == program:
            return status
        if pid == 0:
            return None
    return None


def too_much(job: dict[str, Any], seconds: float, proc: int | None) -> str:
    """What the program and all that it started has had too much of: time, memory or processes."""
    if seconds > job["seconds"]:
        return f"it ran longer than {job['seconds']:g} s"
    if proc is None:
        return ""
    used, files = shared_memory(proc), dict[tuple[int, int], int]()
    others = [pid for pid in os.listdir(proc) if pid.isdigit() and pid != "1"]
    for pid in others:
        with contextlib.suppress(OSError):  # it has just ended
            used += int(read(f"{pid}/statm", proc).split()[1]) * resource.getpagesize()
            files |= open_files(f"{pid}/fd", proc)
    if used + sum(files.values()) > job["memory"]:
        return f"it used more than {job['memory'] >> 20} MiB of memory"
    return f"it had more than {job['processes']} processes" if len(others) > job["processes"] else ""


def read(path: str, proc: int) -> str:
    with open(path, opener=functools.partial(os.open, dir_fd=proc)) as file:
        return file.read()


def shared_memory(proc: int) -> int:
    """What System V's segments hold, which stay when those who made them are gone; there may be no such thing."""
    with contextlib.suppress(FileNotFoundError):
        return sum(int(row.split()[14]) for row in read("sysvipc/shm", proc).splitlines()[1:])
    return 0


def open_files(folder: str, proc: int) -> dict[tuple[int, int], int]:
    """How much the files behind a process's descriptors hold, each named by device and number."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY, dir_fd=proc)
    try:
        found = [os.stat(name, dir_fd=descriptor) for name in os.listdir(descriptor)]
    finally:
        os.close(descriptor)
    return {(f.st_dev, f.st_ino): f.st_blocks * 512 for f in found if stat.S_ISREG(f.st_mode)}


def end_all(program: int, confined: bool) -> None:
    """Ends everything that the program started, as far as this process can know it."""
    if confined and os.getpid() == 1:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)  # in this namespace, that is
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(program, signal.SIGKILL)
    while left := children():
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)


def children() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []


def told(status: int | None, message: bytes) -> str:
    """Why it failed: by its own word, which may be a lie, or by how it ended."""
    if status is not None and os.WIFSIGNALED(status):
        return f"it was ended by {signal.Signals(os.WTERMSIG(status)).name}"
    said = "".join(c if c.isprintable() else " " for c in message.decode(errors="replace"))
    return said[:300].strip() or "it ended before its tests did"


if __name__ == "__main__":
    main()
