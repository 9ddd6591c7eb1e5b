"""The one exception that user mistakes raise."""


class DllmError(ValueError):
    """A mistake in the input, said in one sentence that names the thing and the fix.

    Command lines print the sentence and exit with status 2; everything else lets it propagate.
    """
