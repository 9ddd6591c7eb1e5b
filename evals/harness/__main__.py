"""The harness's own command line, which knows the model `dllm_jax` here:

python -m evals.harness --model dllm_jax --model_args pretrained=DIR,preset=llada-base/gsm8k --tasks gsm8k
"""

import sys

from dllm_jax.cli.command import run_printing


def main() -> int:
    """Runs it; mistakes are one sentence, as in the library's own commands."""
    return run_printing(_run, "use a smaller --batch_size")


def _run() -> None:
    from evals.harness.model import DllmLM  # noqa: F401 - importing it registers it

    from lm_eval.__main__ import cli_evaluate  # isort: skip - behind the sentence about the missing package

    cli_evaluate()


if __name__ == "__main__":
    sys.exit(main())
