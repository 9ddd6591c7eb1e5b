"""A process that compiles one regular expression or JSON schema, within bounds of time and memory; see
`automaton._run_worker`. It runs as a script, so it imports nothing of this library.

A short pattern can have more states than any memory holds, and the package that compiles it has no bound of its own.
"""

import itertools
import json
import re
import sys

SECONDS = 10
MEMORY = 4 * 2**30  # bytes


def main() -> None:
    """Reads {"regex", "last", "states"} or {"schema"} from the standard input; writes a result or {"error"}."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    except (ImportError, ValueError):  # another system, or a lower limit: the caller's clock is left
        pass
    question = json.load(sys.stdin)
    try:
        answer = _table(**question) if "regex" in question else _pattern(question["schema"])
    except Exception as error:  # the package's own kinds
        answer = {"error": (str(error).strip().splitlines() or [type(error).__name__])[0]}
    json.dump(answer, sys.stdout)


def _pattern(schema: str) -> dict[str, object]:
    from outlines_core.json_schema import build_regex_from_schema

    return {"regex": build_regex_from_schema(schema)}


def _table(regex: str, last: str, states: int) -> dict[str, object]:
    """The automaton over bytes of an expression with a last character after it, which has so many states at most:
    {"start", "accept": [states], "edges": [[state, byte, next]]}."""
    from outlines_core import Index, Vocabulary

    end = 256
    index = Index(f"(?:{regex}){last}", Vocabulary(end, {bytes([byte]): [byte] for byte in range(256)}))
    if not is_balanced(regex):  # a parenthesis too many would close the group above
        try:
            Index(regex, Vocabulary(end, {b"a": [0]}))
        except ValueError as error:
            if "Failed to build" in str(error):
                raise
    found = index.get_transitions()
    if len(found) > states:
        return {"error": f"it has {len(found)} states, of {states} at most"}
    edges = [[state, byte, to] for state, row in found.items() for byte, to in row.items() if byte != end]
    return {"start": index.get_initial_state(), "accept": sorted(index.get_final_states()), "edges": edges}


def is_balanced(regex: str) -> bool:
    """Whether no parenthesis is closed that was not opened; False also for sets in sets and for comments, unread."""
    plain = re.sub(r"\\.", "", regex, flags=re.DOTALL)  # without what is escaped
    if re.search(r"\[\^?\]?[^\]]*\[|\(\?[a-zA-Z-]*x", plain):
        return False
    plain = re.sub(r"\[\^?\]?[^\]]*\]", "", plain)
    return min(itertools.accumulate((x == "(") - (x == ")") for x in plain), default=0) >= 0


if __name__ == "__main__":
    main()
