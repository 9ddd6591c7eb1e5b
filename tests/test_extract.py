"""What of an answer counts: sanitized code, fenced blocks, numbers, letters and boxes."""

import textwrap
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evals.extraction import (
    before_fence,
    begin_done,
    boxed,
    first_fence,
    last_bare_number,
    option_letter,
    python_fence,
    stated_letter,
)
from evals.sandbox import sanitize

STUB = '''from typing import List


def biggest(values: List[int]) -> int:
    """The biggest value.

    >>> biggest([1, 3, 2])
    3
    """
'''


def code(text):
    return textwrap.dedent(text).strip("\n")


def test_a_continued_body():
    kept = sanitize(f"{STUB}\n    return max(values)\n\nSo that is the answer, isn't it?", "biggest")
    assert kept.startswith("from typing import List\ndef biggest(values: List[int]) -> int:\n")
    assert kept.endswith("return max(values)")


def test_a_repeated_signature_and_helpers():
    answer = """
        Here it is:
        ```python
        import math
        LIMIT = 3
        unused = 4
        def helper(x):
        \treturn min(x, LIMIT)
        def other(x):
            return x
        def shows(x):
            print(x)
        class Box:
            pass
        def biggest(values):
            return helper(max(values))
        print(biggest([1]))
        ```
        and more
        ```python
        def biggest(values): return 0
        ```
        """
    kept = sanitize(STUB + "\n" + python_fence(textwrap.dedent(answer)), "biggest")
    assert kept == code("""
        from typing import List
        import math
        LIMIT = 3
        def helper(x):
            return min(x, LIMIT)
        def biggest(values):
            return helper(max(values))
        """)
    space = {}
    exec(kept, space)
    assert space["biggest"]([1, 2, 7]) == 3


def test_without_an_entry_point_every_definition_stays():
    text = "x = 1\ndef f():\n    return x\ndef shows():\n    print(x)\nclass C:\n    pass\nx[0] = 2\na, b = 1, 2"
    assert sanitize(text) == "x = 1\ndef f():\n    return x\nclass C:\n    pass\na, b = (1, 2)"


def test_the_last_definition_counts():
    assert sanitize("def f():\n    return 1\ndef f():\n    return 2", "f") == "def f():\n    return 2"


@pytest.mark.parametrize(
    "text, kept",
    [
        ("", ""),
        ("No Python, only words; and a bracket (", ""),
        ("def g():\n    return 1", ""),
        ("words here\n\ndef f():\n    return 1\n\nmore words here", "def f():\n    return 1"),
        ("  indented words\n    def f(): return 1", ""),
        ("def f():\n\treturn 'é' + '漢'", "def f():\n    return 'é' + '漢'"),
        ("async def f():\n    return 1", "async def f():\n    return 1"),
        ("f = lambda: 1", "f = lambda: 1"),
        ("x = '\0'\ndef f():\n    return 1", "def f():\n    return 1"),
        ("def f():\n    return '\\d'", "def f():\n    return '\\\\d'"),
        ("\n" * 99 + "def f(): return 1", "def f():\n    return 1"),
        ("\n" * 100 + "def f(): return 1", ""),
        ("f = " + "(" * 5000 + ")" * 5000, ""),
        ("f = " + "-" * 100_000 + "1", ""),
        ("f = " + "+".join("1" * 50_000), ""),
    ],
)
def test_what_is_left(text, kept):
    assert sanitize(text, "f") == kept


def test_the_longest_run_and_of_equals_the_first():
    assert sanitize("def f():\n    return 1\n)\ndef f():\n    return 2", "f") == "def f():\n    return 1"
    assert sanitize("def f():\n    return 1\n)\ndef f():\n    # two\n    return 2", "f") == "def f():\n    return 2"


@pytest.mark.parametrize("line", ["words that are not code at all\n", "x = (\n", "def f(:\n", "f = 1\n", "'''\n"])
def test_long_texts_are_fast(line):
    began = time.perf_counter()
    sanitize(line * 100_000, "f")
    assert time.perf_counter() - began < 10


@settings(deadline=None, max_examples=50)
@given(st.text(alphabet="def f():\n\t =1x'#`\\{}éß", max_size=300))
def test_any_text_gives_python_or_nothing(text):
    compile(sanitize(text), "kept", "exec")
    for extract in (begin_done, boxed, first_fence, last_bare_number, option_letter, python_fence):
        extract(text)


@pytest.mark.parametrize(
    "text, python, first",
    [
        ("a\n```python\nx\n```\n```python\ny\n```", "x\n", "x\n"),
        ("a\n```\nx\n```\n```python\ny\n```", "y\n", "x\n"),
        ("```python\nx", "x", "```python\nx"),
        ("  x = 1", "  x = 1", "x = 1"),
        ("```py\n  x\n```", "```py\n  x\n```", "x\n"),
    ],
)
def test_fences(text, python, first):
    assert (python_fence(text), first_fence(text)) == (python, first)


def test_a_fence_that_the_prompt_opened():
    assert before_fence("x\n```\nwords") == "x\n" and before_fence("x") == "x"


@pytest.mark.parametrize(
    "text",
    [
        "[BEGIN]\nx = 'a'\n[DONE]\nmore [BEGIN] y [DONE]",
        "x = 'a'\n[DONE]",
        "\nx = 'a'",
        "[BEGIN]\n 'x = 'a''\n[DONE]",
        "BEGIN\nx = 'a'\nDONE",
        "[BEGIN]\n```python\nx = 'a'\n```\n[DONE]",
        "Sure: [BEGIN]x = 'a'[DONE]",
    ],
)
def test_begin_and_done(text):
    assert begin_done(text) == "x = 'a'"


@pytest.mark.parametrize(
    "text, number",
    [
        ("3 apples and 4.5 pears: -7", "-7"),
        ("1,234", "234"),
        ("The answer is 12. Question: 5?", "12"),
        ("2.50 dollars", "2.50"),
        ("none", None),
        ("", None),
    ],
)
def test_last_bare_numbers(text, number):
    assert last_bare_number(text) == number


@pytest.mark.parametrize(
    "text, letter",
    [
        ("B", "B"),
        (" (C)", "C"),
        ("D. because of A", "D"),
        ("A man has B", "B"),
        ("A", "A"),
        ("The answer is a number. The answer is (C).", "C"),
        ("I think A, no: the answer is **B**", "B"),
        ("Answer: D", "D"),
        ("BAD", None),
        ("E", None),
        ("", None),
    ],
)
def test_option_letters(text, letter):
    assert option_letter(text) == letter


def test_stated_letters():
    assert stated_letter("The correct answer is (B). The correct answer is (C)", "The correct answer is", "ABCD") == "C"
    assert stated_letter("answer: j", "ANSWER:", "ABCDEFGHIJ") == "J"
    assert stated_letter("ANSWER: **C**", "ANSWER:", "ABC") == "C"
    assert stated_letter("ANSWER: Dog", "ANSWER:", "ABCD") is None


@pytest.mark.parametrize(
    "text, inside",
    [
        (r"so \boxed{1} and \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\fbox{3} then {", "3"),
        (r"{ \boxed {x} \boxed{open", "x"),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\boxed{", None),
        ("5", None),
        (r"\boxed{" * 50_000, None),
    ],
)
def test_boxes(text, inside):
    assert boxed(text) == inside
