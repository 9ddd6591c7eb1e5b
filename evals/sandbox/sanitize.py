"""The post-processing of published HumanEval numbers of Dream-Base, Fast-dLLM and D2F ("sanitize").

Of a text with code, what the entry point needs stays: among the first lines the longest run
that is Python, and of that the imports and the definitions that the entry point reaches. Where the model repeats the
signature that it was given, the first one has no `return`, and goes.
"""

import ast
import itertools
import warnings
from collections.abc import Iterator

_LINES = 100


def sanitize(text: str, entry_point: str | None = None) -> str:
    """The code in a text, cut down to what an entry point needs and printed anew.

    Args:
        text: any text; for HumanEval the stub, a newline and `python_fence` of the answer.
        entry_point: name of the function that tests call; None keeps every definition.

    Returns:
        Python source, each import and definition as `ast.unparse` prints it, in their order; "" where there is none.
    """
    body = _longest_code(text.replace("\t", "    ").split("\n")[:_LINES]).body
    imports = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
    defined = {name: node for node in body for name in _names(node)}  # the last one counts, as it does in Python
    reached = set(defined) if entry_point is None else _reachable(entry_point, defined)
    wanted = imports + [node for name, node in defined.items() if name in reached]
    ordered = sorted({id(node): node for node in wanted}.values(), key=body.index)
    try:
        return "\n".join(ast.unparse(node) for node in ordered)
    except RecursionError:
        return ""


def _longest_code(lines: list[str]) -> ast.Module:
    """The run of lines with most non-empty ones that is Python; of several the first."""
    filled = list(itertools.accumulate((bool(line.strip()) for line in lines), initial=0))
    runs = [(filled[end] - filled[start], -start, -end) for start, end in _runs(lines)]
    for _, start, end in sorted(runs, reverse=True):
        if (found := _parse("\n".join(lines[-start:-end]))) is not None:
            return found
    return ast.Module([], [])


def _runs(lines: list[str]) -> Iterator[tuple[int, int]]:
    """[start, end) of the runs that may be Python: between filled lines, and not indented, but for a comment."""
    for start, first in enumerate(lines):
        if first.strip() and (not first[0].isspace() or first.lstrip().startswith("#")):
            yield from ((start, end + 1) for end in range(start, len(lines)) if lines[end].strip())


def _parse(code: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that are none
            return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _names(node: ast.stmt) -> list[str]:
    """What a statement defines, if it is one that may stay: a function with a return, a class, an assignment."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return [node.name] if any(isinstance(part, ast.Return) for part in ast.walk(node)) else []
        case ast.ClassDef():
            return [node.name]
        case ast.Assign() | ast.AnnAssign():
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            parts = [part for target in targets for part in ast.walk(target)]
            return [p.id for p in parts if isinstance(p, ast.Name) and isinstance(p.ctx, ast.Store)]
    return []


def _reachable(entry_point: str, defined: dict[str, ast.stmt]) -> set[str]:
    reached, ahead = set[str](), [entry_point]
    while ahead:
        name = ahead.pop()
        if name in defined and name not in reached:
            reached.add(name)
            ahead += [part.id for part in ast.walk(defined[name]) if isinstance(part, ast.Name)]
    return reached
