"""What runs a program inside the box: `python -c <this> DESCRIPTOR PACKAGES...`, token and code on standard input.

The token says that the code ran to its end, so the code must not find it. It is in no variable and no frame: the steps
(run the code, send the token, leave) are held by a `map` that C code alone looks into, and stand one behind the other
there, so that no line of Python runs between the code's end and the token's way out. The lists of the garbage
collector, which alone show such things to Python, are refused by a hook that cannot be taken away.
"""

import os
import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from operator import call
from types import ModuleType
from typing import Any


def steps(verdict: int) -> tuple[Callable[[], Any], ...]:
    """The code, the token and the exit, ready to be called. The code's `__name__` is not `__main__`, as with exec."""
    with open(0, "rb") as pipe:
        token, code = pipe.read().split(b"\n", 1)
    os.open(os.devnull, os.O_RDONLY)  # becomes standard input
    module = ModuleType("program")
    sys.modules["program"] = module
    compiled = compile(code.decode("utf-8", "surrogatepass"), "program.py", "exec", dont_inherit=True)
    lists = frozenset({"gc.get_objects", "gc.get_referrers", "gc.get_referents"})

    def refuse(event: str, _: tuple[Any, ...]) -> None:
        if event in lists:
            raise RuntimeError(f"{event} is not to be had here")

    sys.addaudithook(refuse)
    return partial(exec, compiled, vars(module)), partial(os.write, verdict, token), partial(os._exit, 0)


def main(verdict: int, packages: list[str]) -> None:
    sys.path += packages
    sys.argv = ["program.py"]
    try:
        deque(map(call, steps(verdict)), maxlen=0)
    except BaseException as error:
        os.write(verdict, f"{type(error).__name__}: {error}"[:300].rstrip(": ").encode(errors="replace"))
        os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
