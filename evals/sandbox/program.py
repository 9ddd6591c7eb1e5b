"""What runs a program inside the box: `python -c <this> DESCRIPTOR TOKENS PACKAGES...`.

Standard input has the number of the token that is believed (2 bytes), so many tokens (32 bytes each), and the code.

The token says that the code ran to its end, so the code must not find it. It is in no variable and no frame: the steps
(run the code, send the token, leave) are held by a `map` that C code alone looks into, and stand one behind the other
there, so that no line of Python runs between the code's end and the token's way out. The lists of the garbage
collector, which alone show such things to Python, are refused by a hook that cannot be taken away. Who searches memory
by other means finds all the tokens, held alike, and has one guess; only where they stand in the steps tells them apart.
"""

import os
import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from operator import call
from types import ModuleType
from typing import Any


def steps(verdict: int, tokens: int) -> tuple[Callable[[], Any], ...]:
    """The code, the token and the exit, ready to be called, and behind them the other tokens, which are never sent. The
    code's `__name__` is not `__main__`, as with exec."""
    believed = int.from_bytes(os.read(0, 2), "big")  # not by the pipe's buffer, in which a copy would stay
    with open(0, "rb") as pipe:
        sends = [partial(os.write, verdict, pipe.read(32)) for _ in range(tokens)]
        code = pipe.read()
    send = sends.pop(believed)
    os.open(os.devnull, os.O_RDONLY)  # becomes standard input
    module = ModuleType("program")
    sys.modules["program"] = module
    compiled = compile(code.decode("utf-8", "surrogatepass"), "program.py", "exec", dont_inherit=True)
    lists = frozenset({"gc.get_objects", "gc.get_referrers", "gc.get_referents"})

    def refuse(event: str, _: tuple[Any, ...]) -> None:
        if event in lists:
            raise RuntimeError(f"{event} is not available here")

    sys.addaudithook(refuse)
    return partial(exec, compiled, vars(module)), send, partial(os._exit, 0), *sends


def main(verdict: int, tokens: int, packages: list[str]) -> None:
    sys.path += packages
    sys.argv = ["program.py"]
    try:
        deque(map(call, steps(verdict, tokens)), maxlen=0)
    except BaseException as error:
        os.write(verdict, f"{type(error).__name__}: {error}"[:300].rstrip(": ").encode(errors="replace"))
        os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
