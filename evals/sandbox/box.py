"""The box in which one program is judged: a process of its own, `python box.py`, on the standard library alone.

A job comes as JSON on standard input, and the outcome goes as JSON to standard output. Three processes take part:

    outside     makes the namespaces, and waits; its end ends everything
    keeper      process 1 of the new PID namespace: builds the file system, watches the clock, memory and the number
                of processes, and judges; when it ends, the kernel ends everything in the namespace
    program     `program.py`, without privileges, in a session of its own, behind a filter of calls

The file system holds the interpreter, its libraries and the installed packages, read-only, and one empty folder in
memory. The old one is not hidden but gone: nothing that is not named in the job can be read. There is no /proc, no
network interface that is up, and no process is visible but the program's own.
"""

import contextlib
import ctypes
import errno
import functools
import json
import os
import resource
import secrets
import select
import signal
import stat
import struct
import subprocess
import sys
import time
from typing import Any

WORK = "/var/program"
SETUP = "/tmp"  # where the new root is put together; any folder will do, only this process sees it
DEVICES = ("null", "zero", "full", "random", "urandom")
OPEN_FILES, LONGEST_MESSAGE, WATCHED_EVERY = 64, 4096, 0.02
OVERLOADED = 10  # so many times the bound by the clock is the most that waiting for a processor can make of it

# From linux/sched.h, linux/mount.h and linux/prctl.h; mount_setattr has this number on every architecture but Alpha.
NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
NOSUID, NODEV, NOEXEC, BIND, RECURSIVE, PRIVATE, DETACH = 2, 4, 8, 0x1000, 0x4000, 0x40000, 2
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, ATTR_READ_ONLY = 442, -100, 0x8000, 1 | 2 | 4  # and neither set-uid nor devices
PARENT_DEATH_SIGNAL, DUMPABLE, SECCOMP, NO_NEW_PRIVILEGES, SUBREAPER = 1, 4, 22, 38, 36

# Calls that a Python program does without: they read or steer another process, change file systems and namespaces, or
# are where many exploits of the kernel began. The numbers are those of linux/audit.h and of each asm/unistd.h.
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7, "riscv64": 0xC00000F3}
REFUSED_CALLS = {  # name: (on x86_64, on aarch64 and riscv64)
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "perf_event_open": (298, 241),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    "personality": (135, 92),
}
CLONE, CLONE3 = (56, 220), 435
NEW_NAMESPACES = 0x7E020000  # the flags of clone that make namespaces

libc = ctypes.CDLL(None, use_errno=True)


class Refused(Exception):
    """A part of the box is not available."""


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # process 1 gets only the signals that it handles
    job = json.load(sys.stdin.buffer)
    try:
        if job["unsafe"]:
            if sys.platform == "linux":
                die_with_parent()
                call("prctl", SUBREAPER, 1)  # what the program leaves behind becomes a child of this process
            print_outcome(run_and_judge(job, job["folder"], None, None))
            return
        die_with_parent()
        user = separate()
        if keeper := os.fork():
            _, status = os.waitpid(keeper, 0)
            if os.WIFSIGNALED(status):
                print_outcome(failure("its box was ended"))
            return
        die_with_parent()
        print_outcome(run_and_judge(job, WORK, build_root(job), user))
        os._exit(0)
    except Refused as error:
        print_outcome({"refused": str(error)})


def print_outcome(outcome: dict[str, Any]) -> None:
    print(json.dumps(outcome), flush=True)


def failure(reason: str) -> dict[str, Any]:
    return {"passed": False, "reason": reason, "seconds": 0.0}


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
        The user that the program is to run as: an unused one, so that its processes are counted alone.
        None without the right to become another; the program is then the same user in a user namespace of its own.
    """
    with contextlib.suppress(Refused):
        if knows_all_users():
            call("unshare", NEWNS | NEWUTS | NEWIPC | NEWPID | NEWNET)
            return 0x10000000 + secrets.randbelow(0x10000000)
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


def build_root(job: dict[str, Any]) -> int:
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
            expose(path)
    for name in DEVICES:
        expose(f"/dev/{name}", device=True)
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


def expose(path: str, device: bool = False) -> None:
    """Makes a path of the old file system visible in the new one, at the same place."""
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


def run_and_judge(job: dict[str, Any], folder: str, proc: int | None, user: int | None) -> dict[str, Any]:
    """Runs the program until it ends or exceeds a limit, ends all that it started, and returns the outcome.

    It has passed if, and only if, one of many tokens came back: `program.py` sends it once the code has run to its end.

    Raises:
        Refused: when it cannot be started.
    """
    if sys.platform == "linux":
        call("prctl", DUMPABLE, 0, 0, 0, 0)  # a process of the same user cannot read this one, which has the tokens
    tokens = [os.urandom(16).hex().encode() for _ in range(job["tokens"])]
    believed = secrets.randbelow(len(tokens))
    answers, verdict = os.pipe()
    job["filter"], unfiltered = filter_of_calls()
    started = time.monotonic()
    program = start(job, folder, verdict, user)
    os.close(verdict)
    message, excess, status = b"", "", None
    queued: dict[str, float] = {}
    try:
        with contextlib.suppress(BrokenPipeError), program.stdin as pipe:  # type: ignore[union-attr]
            pipe.write(believed.to_bytes(2, "big") + b"".join(tokens) + job["code"].encode("utf-8", "surrogatepass"))
        while status is None and not excess:
            message = receive(answers, message, WATCHED_EVERY)
            status = reap(program.pid)
            if status is None:
                excess = too_much(job, time.monotonic() - started, proc, queued)
            elif processor_time([]) > job["seconds"]:
                excess = overworked(job)
    except OSError as error:  # which a program of the same user may have brought about
        excess = f"its box broke ({error})"
    seconds = time.monotonic() - started
    end_all(program.pid, confined=proc is not None)
    message = receive(answers, message, 0)
    passed = status == 0 and message == tokens[believed] and not excess
    reason = "" if passed else excess or failure_reason(status, message)
    return {"passed": passed, "reason": reason, "seconds": seconds, "unfiltered": "" if job["unsafe"] else unfiltered}


def start(job: dict[str, Any], folder: str, verdict: int, user: int | None) -> subprocess.Popen[bytes]:
    who: dict[str, Any] = {} if user is None else {"user": user, "group": user, "extra_groups": []}
    try:
        return subprocess.Popen(
            [*job["python"], "-c", job["harness"], str(verdict), str(job["tokens"]), *job["packages"]],
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
    if program := job["filter"]:
        held = ctypes.create_string_buffer(program, len(program))
        fprog = struct.pack("HL", len(program) // 8, ctypes.addressof(held))  # struct sock_fprog
        call("prctl", SECCOMP, 2, fprog, 0, 0)


def filter_of_calls() -> tuple[bytes, str]:
    """A filter of system calls as BPF, or nothing and why there is none here."""
    machine = os.uname().machine
    if sys.platform != "linux" or machine not in ARCHITECTURES:
        return b"", f"the numbers of system calls are not known for {machine}"
    if libc.prctl(SECCOMP, 2, None, 0, 0) == 0 or ctypes.get_errno() != errno.EFAULT:  # as without an address
        return b"", "this kernel has no seccomp filters"
    column = 0 if machine == "x86_64" else 1
    load, jump_if, jump_from, jump_any, answer = 0x20, 0x15, 0x35, 0x45, 0x06  # BPF_LD, BPF_JMP of kinds, BPF_RET
    refuse, absent, allow = 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS, 0x7FFF0000
    # (code, jump if so, jump if not, value); of a call it sees number (0), architecture (4) and first argument (16)
    steps = [(load, 0, 0, 4), (jump_if, 1, 0, ARCHITECTURES[machine]), (answer, 0, 0, refuse), (load, 0, 0, 0)]
    steps += [(jump_from, 0, 1, 0x40000000), (answer, 0, 0, refuse)]  # the second table of x86_64, "x32"
    for numbers in REFUSED_CALLS.values():
        steps += [(jump_if, 0, 1, numbers[column]), (answer, 0, 0, refuse)]
    steps += [(jump_if, 0, 1, CLONE3), (answer, 0, 0, absent)]  # its flags are hidden; C libraries then take clone
    steps += [(jump_if, 0, 3, CLONE[column]), (load, 0, 0, 16), (jump_any, 0, 1, NEW_NAMESPACES)]
    steps += [(answer, 0, 0, refuse), (answer, 0, 0, allow)]
    return b"".join(struct.pack("=HBBI", *step) for step in steps), ""


def receive(answers: int, message: bytes, wait: float) -> bytes:
    """The message with what the program has sent since, for which this waits. Too much of it is dropped."""
    if select.select([answers], [], [], wait)[0]:
        if more := os.read(answers, LONGEST_MESSAGE):
            return (message + more)[:LONGEST_MESSAGE]
        time.sleep(wait)  # it has closed its end
    return message


def reap(program: int) -> int | None:
    """Waits for processes that ended, orphans among them; the program's status once it is one of them."""
    for _ in range(100):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == program:
            return status
        if pid == 0:
            return None
    return None


def too_much(job: dict[str, Any], seconds: float, proc: int | None, queued: dict[str, float]) -> str:
    """The limit that the program and all that it started exceed: time, memory or processes; "" for none.

    Time is that of the processor, so that a program passes however busy the machine is. The bound by the clock is for
    those that wait, and leaves out what they waited for a processor.

    Args:
        seconds: since the start, by the clock.
        queued: process -> the seconds that it waited for a processor; it is brought up to date.
    """
    used, files, stats, others = 0, dict[tuple[int, int], int](), list[list[str]](), list[str]()
    if proc is not None:
        used = shared_memory(proc)
        others = [pid for pid in os.listdir(proc) if pid.isdigit() and pid != "1"]
        for pid in others:
            with contextlib.suppress(OSError):  # it has just ended
                stats.append(read(f"{pid}/stat", proc).rpartition(")")[2].split())
                used += int(stats[-1][21]) * resource.getpagesize()
                files |= open_files(f"{pid}/fd", proc)
                queued[pid] = int(read(f"{pid}/schedstat", proc).split()[1]) / 1e9
    if processor_time(stats) > job["seconds"]:
        return overworked(job)
    if seconds - sum(queued.values()) > job["wall"] or seconds > OVERLOADED * job["wall"]:
        return f"it ran longer than {job['wall']:g} s"
    if used + sum(files.values()) > job["memory"]:
        return f"it used more than {job['memory'] >> 20} MiB of memory"
    return f"it had more than {job['processes']} processes" if len(others) > job["processes"] else ""


def processor_time(stats: list[list[str]]) -> float:
    """Seconds of the processor: of processes by their `stat` from the third field on, and of what has ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    ticks = sum(int(ticks) for fields in stats for ticks in fields[11:15])  # each one's own, and its ended children's
    return ended.ru_utime + ended.ru_stime + ticks / os.sysconf("SC_CLK_TCK")


def overworked(job: dict[str, Any]) -> str:
    return f"it used more than {job['seconds']:g} s of the processor"


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


def failure_reason(status: int | None, message: bytes) -> str:
    """Why it failed: its own message, which may be a lie, or how it ended."""
    if status is not None and os.WIFSIGNALED(status):
        return f"it was ended by {signal.Signals(os.WTERMSIG(status)).name}"
    text = "".join(c if c.isprintable() else " " for c in message.decode(errors="replace"))
    return text[:300].strip() or "it ended before its tests did"


if __name__ == "__main__":
    main()
