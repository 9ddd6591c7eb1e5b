"""The one exception that user mistakes raise, and what it quotes of others."""


class DllmError(ValueError):
    """A mistake in the input, said in one sentence that names the thing and the fix.

    Command lines print the sentence and exit with status 2; everything else lets it propagate.
    """


def first_line(error: Exception) -> str:
    """The first line of another's error, or its class where it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
