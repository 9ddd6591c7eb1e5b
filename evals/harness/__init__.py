"""lm-evaluation-harness with the library's models (docs/harness.md).

`evals.harness.model.DllmLM` is the model as the harness takes it, `python -m evals lm` runs presets, and
`python -m evals.harness` is the harness's own command with the model `dllm_jax` registered.
"""
