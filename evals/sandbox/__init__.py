"""Generated programs: run where they can do no harm, and judged by their tests.

    from evals.sandbox import run_program, sanitize

    run_program(sanitize(answer, "add") + "\nassert add(2, 2) == 4").passed

`docs/code-tasks.md` says how a program is confined.
"""

from evals.sandbox.running import ProgramOutcome, require_box, run_program, run_programs
from evals.sandbox.sanitize import sanitize

__all__ = [
    "ProgramOutcome",
    "require_box",
    "run_program",
    "run_programs",
    "sanitize",
]
