"""Generated programs: hostile ones do no harm and never pass, honest ones pass, and nothing is left of either.

A hostile program here runs to its end if, and only if, its attack came off: so each must fail.
"""

import contextlib
import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
import warnings
from pathlib import Path

import pytest

from dllm_jax import DllmError
from evals.sandbox import box, run_program, run_programs, running

SMALL = {"seconds": 1.0, "wall": 2.0, "memory": 128 << 20, "files": 4 << 20, "processes": 8}
PATIENT = SMALL | {"seconds": 20, "wall": 60}  # for programs that end by themselves


def _confines() -> str:
    try:
        run_program("pass")
    except DllmError as error:
        return str(error)
    return ""


REFUSED = _confines()
confined = pytest.mark.skipif(bool(REFUSED), reason=REFUSED)

HOSTILE = {
    "fork bomb": """
        import os
        while True:
            try: os.fork()
            except OSError: pass
        """,
    "fork bomb of short lives": """
        import os
        while True:
            try:
                if os.fork(): os._exit(0)
            except OSError: pass
        """,
    "endless output": """
        import os
        while True:
            print("x" * 10**6); os.write(1, b"x" * 10**6); os.write(2, b"x" * 10**6)
        """,
    "endless verdict": """
        import os
        while True:
            for fd in range(3, 64):
                try: os.write(fd, b"x" * 10**5)
                except OSError: pass
        """,
    "endless loop": "while True: pass",
    "a loop that no exception ends": """
        import signal
        for number in range(1, 32):
            try: signal.signal(number, signal.SIG_IGN)
            except OSError: pass
        while True:
            try:
                while True: pass
            except BaseException: pass
        """,
    "sleep": "import time; time.sleep(600)",
    "huge memory": """
        held = []
        while True: held.append(bytearray(b"x" * 2**22))
        """,
    "memory of many processes": """
        import os, time
        told, telling = os.pipe()
        for _ in range(6):
            if not os.fork():
                held = bytearray(b"x" * (60 << 20)); os.write(telling, b"x"); time.sleep(60)
        for _ in range(6): os.read(told, 1)
        time.sleep(0.4)
        """,
    "memory behind descriptors": """
        import os, time
        for number in range(50):
            fd = os.memfd_create(str(number))
            for _ in range(4): os.write(fd, bytes(2**20))
        time.sleep(0.4)
        """,
    "huge file": """
        with open("x", "wb") as file:
            for _ in range(1000): file.write(bytes(2**20))
        """,
    "many big files": """
        for number in range(100):
            with open(str(number), "wb") as file: file.write(bytes(2**20))
        """,
    "many files": "for number in range(10**5): open(str(number), 'w').close()",
    "reading a file": "assert 'secret' in open('{secret}').read()",
    "reading by a symbolic link": """
        import os
        os.symlink('{secret}', "link"); assert "secret" in open("link").read()
        """,
    "reading through the old root": """
        import os
        found = []
        for root in ("/old", "..", "../../../..", "/proc/1/root", "/proc/self/root", "/proc/self/cwd"):
            found.append(os.path.exists(root + '{secret}'))
        assert any(found)
        """,
    "listing a home": "import os; assert len(os.listdir('{home}')) > 1",
    "reading an environment": "assert b'=' in open('/proc/{parent}/environ', 'rb').read()",
    "reading its own environment": "import os; assert 'DLLM_SECRET' in os.environ",
    "a socket to this machine": "import socket; socket.create_connection(('127.0.0.1', {port}), 1)",
    "an abstract socket": "import socket; socket.socket(socket.AF_UNIX).connect('\\0{abstract}')",
    "a socket to the world": """
        import socket
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("192.0.2.1", 9))
        """,
    "a signal to the parent": "import os; os.kill({parent}, 0)",
    "signals to the keeper": """
        import os, resource, time
        for pid in (1, os.getppid()):
            for number in range(1, 65):
                try: os.kill(pid, number)
                except OSError: pass
        time.sleep(0.2); raise SystemExit
        """,
    "limits for the keeper": """
        import resource, time
        for name in ("RLIMIT_CPU", "RLIMIT_NOFILE", "RLIMIT_AS", "RLIMIT_NPROC"):
            resource.prlimit(1, getattr(resource, name), (0, 0))
        time.sleep(0.5); raise SystemExit
        """,
    "killing its group": "import os; os.killpg(0, 9)",
    "killing everything": "import os; os.kill(-1, 9); os._exit(0)",
    "a daemon": """
        import os, time
        if not os.fork():
            os.setsid()
            if not os.fork(): time.sleep(60)
            os._exit(0)
        time.sleep(0.1); os._exit(0)
        """,
    "os._exit": "import os; os._exit(0)",
    "sys.exit": "import sys; sys.exit(0)",
    "exit in an exit handler": "import atexit, os; atexit.register(os._exit, 0); assert False",
    "the token in descriptors": """
        import os
        found = []
        for fd in range(64):
            try:
                os.set_blocking(fd, False); os.lseek(fd, 0, 0)
            except OSError: pass
            try: found += os.read(fd, 4096).split()
            except OSError: pass
        {send}
        """,
    "the token in frames": """
        import sys
        found, frame = [], sys._getframe()
        frames = [*sys._current_frames().values()]
        while frame:
            frames.append(frame); frame = frame.f_back
        for frame in frames: found += [dict(frame.f_locals), frame.f_globals, frame.f_builtins, frame.f_code.co_consts]
        {send}
        """,
    "the token in the collector's hands": """
        import gc
        found = []
        for look in (gc.get_objects, lambda: gc.get_referrers(exec), lambda: gc.get_referents(gc)):
            try: found += look()
            except BaseException: pass
        {send}
        """,
    "the token by a profiler": """
        import os, sys
        seen = []
        def look(frame, event, argument):
            seen.append(argument)
            if event == "c_call": seen.extend(getattr(argument, "args", ()))
            found = [x for x in seen if isinstance(x, bytes)]
            return look
        sys.setprofile(look); sys.settrace(look)
        assert False
        """,
    "the token in its own memory": """
        import ctypes, os, re
        libc, found = ctypes.CDLL(None), []
        def read(at):
            file = os.open("page", os.O_CREAT | os.O_RDWR | os.O_TRUNC)
            got = libc.write(file, ctypes.c_void_p(at), ctypes.c_size_t(4096))
            page = os.pread(file, 4096, 0) if got > 0 else b""
            os.close(file)
            return page
        {search}
        """,
    "the token in its parent's memory": """
        import ctypes, os, re
        libc, found = ctypes.CDLL(None), []
        page = ctypes.create_string_buffer(4096)
        if os.fork():
            os.wait(); os._exit(0)
        def read(at):
            here, there = ((ctypes.c_size_t * 2)(place, 4096) for place in (ctypes.addressof(page), at))
            return page.raw if libc.process_vm_readv(os.getppid(), here, 1, there, 1, 0) == 4096 else b""
        {search}
        """,
    "the hook by its code": """
        import __main__, gc, sys
        for value in list(vars(__main__).values()):
            if hasattr(value, "__code__"): value.__code__ = (lambda *a: None).__code__
        vars(__main__).clear()
        sys.addaudithook(lambda *a: None)
        found = gc.get_objects()
        {send}
        """,
    "running the harness again": """
        import __main__, sys
        __main__.main(int(sys.orig_argv[sys.orig_argv.index("-c") + 2]), 1, [])
        assert False
        """,
    "other builtins": """
        import builtins, os, sys
        os.write = os._exit = sys.exit = builtins.exec = print
        vars(builtins).clear()
        assert False
        """,
    "comparing by a liar": """
        class Liar(bytes):
            __eq__ = lambda *a: True
            __hash__ = bytes.__hash__
        found = [Liar(b"a" * 32)]
        {send}
        """,
    "recursion": "f = lambda: f()\nf()",
    "recursion without a limit": """
        import sys
        sys.setrecursionlimit(10**9)
        class A:
            def __getattr__(self, name): return getattr(self, name + "x")
        A().x
        """,
    "threads": """
        import threading, time
        for _ in range(1000): threading.Thread(target=time.sleep, args=(60,)).start()
        """,
    "writing outside": """
        import os, sys
        wrote = 0
        for place in ("/x", "../x", "/usr/lib/x", "/etc/ld.so.cache", "/dev/x", '{folder}' + "/x", sys.executable):
            try: open(place, "a").close(); wrote += 1
            except OSError: pass
        assert wrote
        """,
    "writing by a symbolic link": """
        import os
        os.symlink('{folder}', "link"); open("link/x", "w").close()
        """,
    "a crash": "import faulthandler; faulthandler._sigsegv()",
    "a crash by ctypes": "import ctypes; ctypes.string_at(0)",
    "namespaces by ctypes": """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        libc.unshare(0x10020000)
        mounted = libc.mount(b"proc", b"/proc", b"proc", 0, None)
        assert 0 in (mounted, libc.umount2(b"/usr/lib", 2), libc.chroot(b"/proc/1/root")) or os.path.exists("{secret}")
        """,
    "shared memory by ctypes": """
        import ctypes
        libc = ctypes.CDLL(None)
        libc.shmat.restype = ctypes.c_void_p
        for _ in range(16):
            name = libc.shmget(0, ctypes.c_size_t(32 << 20), 0o1600)
            assert name >= 0
            at = libc.shmat(name, None, 0)
            ctypes.memset(at, 1, 32 << 20); libc.shmdt(ctypes.c_void_p(at))
        """,
    "tracing by ctypes": """
        import ctypes, os
        libc = ctypes.CDLL(None)
        assert 0 in [libc.ptrace(16, pid, None, None) for pid in (1, os.getppid())]
        """,
    "another program": """
        import subprocess
        assert subprocess.run(["/bin/sh", "-c", "true"]).returncode == 0
        """,
    "exec of itself": "import os, sys; os.execv(sys.executable, [sys.executable, '-c', 'pass'])",
    "privileges": "import os; os.setuid(0)",
    "a chroot": "import os; os.chroot('/')",
    "a set-uid file": """
        import os
        with open("x", "wb") as file: file.write(b"#!/bin/true")
        os.chmod("x", 0o6777); os.execv("./x", ["x"])
        """,
    "no Python": "it is (",
    "a null byte": "x = '\\0'\0",
    "a failing test": "assert 1 == 2",
    "nesting": "(" * 10**5,
}

# Looks for the token in and behind what was found, and sends what looks like it.
SEND = """
import os, re, sys
verdict = int(sys.orig_argv[sys.orig_argv.index("-c") + 2])
def inside(x):
    if isinstance(x, dict): return [*x.values()]
    if isinstance(x, (list, tuple, set, frozenset)): return [*x]
    names = ("args", "func", "__self__", "__dict__", "__closure__", "__defaults__", "cell_contents")
    return [getattr(x, name, None) for name in names]
seen, texts = set(), set()
for _ in range(6):
    ahead = []
    for x in found:
        if id(x) in seen: continue
        seen.add(id(x))
        if isinstance(x, (bytes, str)): texts.add(x if isinstance(x, bytes) else x.encode(errors="replace"))
        else: ahead += inside(x)
    found = ahead
for text in texts:
    if re.fullmatch(rb"[0-9a-f]{32}", text) and text not in os.environb.values(): os.write(verdict, text)
os._exit(0)
"""

# Reads what lies around a new object, and sends the first that looks like a token.
SEARCH = """
import sys
verdict = int(sys.orig_argv[sys.orig_argv.index("-c") + 2])
start = id(object()) >> 12 << 12
for at in range(start - (12 << 20), start + (12 << 20), 4096):
    for text in re.findall(rb"(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])", read(at)):
        os.write(verdict, text)
        os._exit(0)
assert False
"""

HONEST = {
    "arithmetic": "assert sum(range(10)) == 45",
    "nothing": "",
    "a class and a test": """
        from dataclasses import dataclass

        @dataclass
        class Point:
            x: "int"
            def doubled(self): return Point(2 * self.x)
        assert Point(2).doubled() == Point(4)
        """,
    "the standard library": """
        import collections, datetime, decimal, enum, hashlib, heapq, itertools, json, math, random, re, sqlite3, zlib
        from typing import NamedTuple
        class Pair(NamedTuple):
            a: int
        Colour = enum.Enum("Colour", "red blue")
        assert collections.namedtuple("P", "a")(1).a == Pair(1).a and Colour.red.name == "red"
        assert json.loads(json.dumps([1])) == [1] and hashlib.sha256(b"").hexdigest().startswith("e3b0")
        """,
    "a file of its own": """
        import os, tempfile
        assert os.listdir(".") == []
        with open("x", "w") as file: file.write("héllo")
        assert open("x").read() == "héllo"
        with tempfile.TemporaryFile() as file: file.write(b"x")
        """,
    "output": "print('x' * 10**6); import sys; print('y', file=sys.stderr)",
    "threads": """
        import concurrent.futures
        with concurrent.futures.ThreadPoolExecutor(3) as pool: assert list(pool.map(abs, [-1, 2])) == [1, 2]
        """,
    "processes": """
        import multiprocessing
        with multiprocessing.get_context("fork").Pool(2) as pool: assert pool.map(abs, [-1, 2]) == [1, 2]
        """,
    "deep recursion": """
        import sys
        sys.setrecursionlimit(20000)
        f = lambda n: 0 if n == 0 else 1 + f(n - 1)
        assert f(9000) == 9000
        """,
    "a clock of its own": """
        import signal, time
        def ring(*a): raise TimeoutError
        signal.signal(signal.SIGALRM, ring); signal.setitimer(signal.ITIMER_REAL, 0.05)
        try: time.sleep(1); assert False
        except TimeoutError: pass
        """,
    "asynchronous": "import asyncio\nasync def f(): return 3\nassert asyncio.run(f()) == 3",
    "ctypes": "import ctypes, multiprocessing\nassert multiprocessing.Value('i', 3).value == ctypes.c_int(3).value",
    "no input": """
        try: input()
        except EOFError: pass
        else: assert False
        """,
    "nothing under __main__": "if __name__ == '__main__': assert False",
    "unicode": "π = 3.14\nassert f'{π}' == '3.14' and '\\ud800'",
    "numpy": "import numpy as np\nassert np.linalg.norm(np.array([3.0, 4.0])) == 5",
}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """What hostile programs are told of, and a mark by which what they leave is found."""
    folder = tmp_path_factory.mktemp("places")
    os.chmod(folder, 0o777)
    (folder / "secret").write_text("secret")
    os.chmod(folder / "secret", 0o666)
    mark, abstract = uuid.uuid4().hex, uuid.uuid4().hex
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind(f"\0{abstract}")
        local.listen()
        yield {
            "folder": str(folder),
            "secret": str(folder / "secret"),
            "home": str(Path.home()),
            "parent": os.getpid(),
            "port": server.getsockname()[1],
            "abstract": abstract,
            "mark": mark,
            "send": SEND,
            "search": SEARCH,
        }
    assert sorted(os.listdir(folder)) == ["secret"] and (folder / "secret").read_text() == "secret"


@pytest.fixture(autouse=True)
def marked(places, monkeypatch):
    monkeypatch.setitem(running._shared_job()["environment"], "MARK", places["mark"])
    monkeypatch.setenv("DLLM_SECRET", "1")
    yield
    wait_until(lambda: not left_of(places["mark"]))  # one that was killed is there until the system has time for it


def left_of(mark):
    """Processes of programs that are still there."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark.encode() in environment.read_bytes():
                found.append(environment.parent.name)
    return found


def written(code, places):
    """The program, with what it is told of put in."""
    code = textwrap.dedent(code)
    for name, value in places.items():
        code = code.replace(f"{{{name}}}", str(value))
    return code


@confined
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_programs_fail(name, places):
    """Each time, but for a guess at the token, of which one in a thousand is right."""
    tries = (run_program(written(HOSTILE[name], places), **SMALL) for _ in range(3))
    assert any(not outcome.passed and outcome.reason for outcome in tries)


@confined
@pytest.mark.parametrize(
    "name, kept, leaky",
    [
        ("the token in frames", "map(call, steps(verdict, tokens))", "map(call, held := steps(verdict, tokens))"),
        ("the token in the collector's hands", "sys.addaudithook(refuse)", "pass"),
        ("the token in its own memory", "", ""),
    ],
)
def test_the_hunt_for_the_token_is_a_real_one(name, kept, leaky, monkeypatch):
    """It finds the token where the harness keeps it less well, and where there is but one."""
    harness = running._shared_job()["harness"]
    assert kept in harness
    monkeypatch.setitem(running._shared_job(), "harness", harness.replace(kept, leaky))
    monkeypatch.setitem(running._shared_job(), "tokens", 1)
    assert run_program(hunting(name), **PATIENT).passed


def hunting(name):
    return written(HOSTILE[name], {"send": SEND, "search": SEARCH})


@pytest.fixture
def unfiltered(monkeypatch, tmp_path):
    """A box without a filter of system calls."""
    box, filtering = running._BOX.read_text(), 'job["filter"], unfiltered = filter_of_calls()'
    assert filtering in box
    (tmp_path / "box.py").write_text(box.replace(filtering, 'job["filter"], unfiltered = b"", "none here"'))
    monkeypatch.setattr(running, "_BOX", tmp_path / "box.py")


@confined
def test_without_the_filter_of_calls_a_parents_memory_is_read(unfiltered, monkeypatch):
    """And a warning says, once, that there is none."""
    monkeypatch.setitem(running._shared_job(), "tokens", 1)
    running._warn_unfiltered.cache_clear()
    with pytest.warns(UserWarning, match="none here"):
        assert run_program(hunting("the token in its parent's memory"), **PATIENT).passed
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run_program("pass", **PATIENT).passed


@confined
def test_calls_that_no_program_needs_are_refused():
    column = ["x86_64", "aarch64", "riscv64"].index(os.uname().machine) > 0
    code = f"""
        import ctypes, errno, os
        libc = ctypes.CDLL(None, use_errno=True)
        def answer(number, *arguments):
            return libc.syscall(number, *arguments, 0, 0, 0, 0), ctypes.get_errno()
        for name, numbers in {box.REFUSED_CALLS}.items():
            assert answer(numbers[{int(column)}]) == (-1, errno.EPERM), name
        assert answer({box.CLONE[column]}, 0x10000000 | 17) == (-1, errno.EPERM)
        assert answer({box.CLONE3}) == (-1, errno.ENOSYS)
        """
    outcome = run_program(textwrap.dedent(code), **PATIENT)
    assert outcome.passed, outcome.reason


@confined
def test_the_keeper_cannot_be_read_by_who_has_its_rights(unfiltered):
    """Neither by the same user with the same rights; the right to look into every process is taken from both."""
    prefix = as_root("setpriv", "--bounding-set", "-sys_ptrace")
    code = """
        import ctypes, errno, os
        libc = ctypes.CDLL(None, use_errno=True)
        page = ctypes.create_string_buffer(8)
        here, there = (ctypes.c_size_t * 2)(ctypes.addressof(page), 8), (ctypes.c_size_t * 2)(4096, 8)
        libc.process_vm_readv(os.getppid(), here, 1, there, 1, 0)
        raise SystemExit(ctypes.get_errno())
        """
    with tempfile.TemporaryDirectory() as folder:
        answer = json.load(boxed(code, *prefix, unsafe=True, folder=folder).stdout)
    assert answer["reason"] == f"SystemExit: {errno.EPERM}"  # else EFAULT: nothing lies at that address


@confined
def test_a_busy_machine_fails_no_honest_program():
    """Six programs at a time on one core, each of which needs a part of the processor's time that it may have."""
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(own)})
    try:
        code = "import time\nwhile time.process_time() < 0.4: pass"
        outcomes = run_programs([code] * 6, workers=6, progress=False, seconds=1.5, wall=2.0)
    finally:
        os.sched_setaffinity(0, own)
    assert [outcome.reason for outcome in outcomes] == [""] * 6


@confined
@pytest.mark.parametrize("name", HONEST)
def test_honest_programs_pass(name):
    outcome = run_program(textwrap.dedent(HONEST[name]), **PATIENT | {"memory": 512 << 20})
    assert outcome.passed, outcome.reason


@confined
def test_a_program_that_passes_leaves_no_daemon(places):
    code = "import os, time\nif not os.fork():\n    os.setsid()\n    time.sleep(60)"
    assert run_program(code, **PATIENT).passed


@confined
def test_a_child_that_ends_well_is_not_its_parent():
    code = "import os\nif os.fork(): os._exit(0)\nassert False"
    assert not run_program(code, **SMALL).passed


@confined
@pytest.mark.parametrize(
    "code, limits, reason",
    [
        ("import time; time.sleep(9)", {"wall": 0.4}, "longer than 0.4 s"),
        ("while True: pass", {"seconds": 0.3}, "more than 0.3 s of the processor"),
        ("import os\nwhile True: os.fork() and os.wait() or os._exit(0)", {"seconds": 0.3}, "of the processor"),
        ("x = bytearray(64 << 20)", {"memory": 48 << 20}, "MemoryError"),
        ("with open('x', 'wb') as file: file.write(bytes(2000))", {"files": 1000}, "File too large"),
        ("import os\nfor _ in range(5): os.fork() or os.pause()", {"processes": 3}, "unavailable"),
    ],
)
def test_limits(code, limits, reason):
    assert reason in run_program(code, **PATIENT | limits).reason


@pytest.mark.parametrize("name", ["seconds", "wall", "memory", "files", "processes"])
def test_limits_that_are_none(name):
    with pytest.raises(DllmError, match="above 0"):
        run_program("pass", **{name: 0})
    with pytest.raises(DllmError, match="finite"):
        run_program("pass", seconds=float("inf"), wall=1)


@confined
def test_many_programs_keep_their_order(capfd):
    codes = ["assert False", "pass", "raise KeyError('x')", "while True: pass", "pass"]
    outcomes = run_programs(codes, workers=2, progress=True, **PATIENT | {"seconds": 1.0})
    assert [o.passed for o in outcomes] == [False, True, False, False, True]
    assert "KeyError" in outcomes[2].reason and "5/5" in capfd.readouterr().err
    assert run_programs([], progress=False) == []
    with pytest.raises(DllmError, match="at least 1"):
        run_programs(codes, workers=0)


def boxed(code, *prefix, **changes):
    """Popen of a box, for what cannot be had by `run_program`."""
    job = running._shared_job() | PATIENT | {"unsafe": False, "code": textwrap.dedent(code)} | changes
    pipe = subprocess.Popen(
        [*prefix, *job["python"], str(running._BOX)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ
    )
    pipe.stdin.write(json.dumps(job).encode())
    pipe.stdin.close()
    return pipe


def as_root(*command):
    if os.getuid() != 0 or shutil.which(command[0]) is None:
        pytest.skip(f"needs root and {command[0]}")
    return command


@confined
def test_without_the_right_to_become_another_user(places):
    """The way of everyone but root: a user namespace of its own. Its processes are counted from outside alone."""
    prefix = as_root("setpriv", "--bounding-set", "-sys_admin")
    names = ("reading a file", "a socket to this machine", "writing outside", "a signal to the parent", "privileges")
    reasons = dict.fromkeys((*names, "huge file", "a chroot"), "Error") | {"signals to the keeper": "SystemExit"}
    for name, reason in (reasons | {"limits for the keeper": "its box"}).items():
        answer = json.load(boxed(written(HOSTILE[name], places), *prefix).stdout)
        assert not answer["passed"] and reason in answer["reason"]
    many = "import os, time\nfor _ in range(12): os.fork() or time.sleep(9)\ntime.sleep(9)"
    assert "more than 8 processes" in json.load(boxed(many, *prefix, memory=1 << 30).stdout)["reason"]
    own = "import os\nassert os.getuid() == 1000 and open('x', 'w').write('x')"
    assert json.load(boxed(own, *prefix).stdout)["passed"]


@confined
def test_where_no_box_can_be_had(monkeypatch):
    """In a user namespace that allows no further one."""
    none = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
    answer = json.load(boxed("pass", *as_root("unshare", "--user", "--map-root-user"), "sh", "-c", none, "sh").stdout)
    assert answer == {"refused": "unshare: No space left on device"}
    monkeypatch.setattr(running, "_run_box", lambda *_: answer)
    with pytest.raises(DllmError, match=r"cannot confine a program \(unshare: No space.*unsafe"):
        run_program("pass")


def test_elsewhere_than_on_linux(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(DllmError, match="on Linux only, not on darwin"):
        run_program("pass")


@confined
def test_a_box_goes_with_who_asked_for_it(places):
    asking = "import subprocess, sys; subprocess.run(sys.argv[1:])"
    code = "import os, time\nos.fork(); os.setsid() if not os.fork() else 0; time.sleep(60)"
    asker = boxed(code, sys.executable, "-c", asking, seconds=60, wall=60, environment={"MARK": places["mark"]})
    wait_until(lambda: len(left_of(places["mark"])) >= 4)
    asker.kill()
    asker.wait()
    wait_until(lambda: not left_of(places["mark"]))


@confined
def test_an_interrupted_run_leaves_nothing(places, monkeypatch):
    def interrupted(self, *args, **kwargs):
        kwargs.pop("timeout", None)
        self.stdin.write(args[0])
        self.stdin.close()
        wait_until(lambda: len(left_of(places["mark"])) >= 3)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_program("import time; time.sleep(60)", seconds=60)
    wait_until(lambda: not left_of(places["mark"]))


def wait_until(true):
    for _ in range(500):
        if true():
            return
        time.sleep(0.02)
    raise AssertionError("that never came")


LIMITED = ("endless output", "endless loop", "sleep", "huge memory", "huge file", "a daemon", "os._exit", "sys.exit")


@pytest.mark.parametrize("name", [*LIMITED, "the token in frames", "recursion", "killing its group", "a failing test"])
def test_hostile_programs_without_a_box(name, places):
    """What limits, an end and a verdict of its own still do."""
    assert not run_program(written(HOSTILE[name], places), unsafe=True, **SMALL).passed


def test_without_a_box(places, tmp_path):
    assert run_program("import os; assert os.listdir() == []; open('x', 'w').write('x')", unsafe=True, **PATIENT).passed
    assert run_program(written(HOSTILE["reading a file"], places), unsafe=True, **PATIENT).passed


def test_without_a_box_a_program_that_ends_its_keeper_fails():
    killing = "import os, signal, time\nos.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(60)"
    assert run_program(killing, unsafe=True, **PATIENT).reason == "its box was ended"
