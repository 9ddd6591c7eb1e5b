"""Generated programs: taken out of an answer, run where they can do no harm, and judged by their tests.

    from evals.sandbox import run_program, sanitize

    run_program(sanitize(answer, "add") + "\nassert add(2, 2) == 4").passed

`docs/code-tasks.md` says how a program is confined.
"""

from evals.sandbox.extract import (
    before_fence,
    begin_done,
    boxed,
    first_fence,
    last_number,
    option_letter,
    python_fence,
    stated_letter,
)
from evals.sandbox.running import Outcome, require_box, run_program, run_programs
from evals.sandbox.sanitize import sanitize

__all__ = [
    "Outcome",
    "before_fence",
    "begin_done",
    "boxed",
    "first_fence",
    "last_number",
    "option_letter",
    "python_fence",
    "require_box",
    "run_program",
    "run_programs",
    "sanitize",
    "stated_letter",
]
