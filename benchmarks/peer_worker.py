"""A process that generates with one implementation, started by `benchmarks.peers`; it imports what that one needs.

    python -m benchmarks.peer_worker ENGINE JOB

JOB is `benchmarks.peers.Job` in JSON. When it has loaded it writes a line, `{"versions": {...}}`; it answers every line
`{"cache": "dual"}` with the tokens and times of a generation, or with `{"error": "..."}`. All lines are JSON.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

Generate = Callable[[str], tuple[list[int], int]]
"""A generation with a cache policy: the generated tokens, and how many forwards it took."""

PACKAGES = {
    "ours": ("jax", "jaxlib"),
    "fast-dllm": ("torch", "transformers"),
    "bonsai": ("jax", "jaxlib", "flax"),
    "bonsai-jit": ("jax", "jaxlib", "flax"),
}


def ours(job: dict[str, Any]) -> Generate:
    """This library, compiled."""
    import jax.numpy as jnp

    import dllm_jax
    from samplers import make_sampler, sample_jit

    model = dllm_jax.load(job["folder"])
    prompt = jnp.asarray([job["prompt"]], jnp.int32)
    lengths = {name: job[name] for name in ("steps", "gen_length", "block_length")}

    def generate(cache: str) -> tuple[list[int], int]:
        sampler = make_sampler(model, rule="llada", cache=cache, ignore_eos=True, **lengths)
        result = sample_jit(sampler, model.denoiser, prompt)
        return result.tokens[0].tolist(), int(result.nfe[0])

    return generate


def fast_dllm(job: dict[str, Any]) -> Generate:
    """NVlabs/Fast-dLLM's functions for LLaDA, in PyTorch."""
    sys.path.insert(0, str(Path(job["checkout"], "llada")))
    import generate as official
    import torch
    from model.configuration_llada import LLaDAConfig
    from model.modeling_llada import LLaDAModelLM
    from safetensors.torch import load_file

    torch.set_num_threads(1)
    config = LLaDAConfig(**json.loads(Path(job["hub"], "config.json").read_text()))
    config.use_cache = False  # newer versions of transformers do not keep it
    model = LLaDAModelLM(config).eval()
    model.load_state_dict(
        {name: x for file in Path(job["hub"]).glob("*.safetensors") for name, x in load_file(file).items()}
    )
    prompt = torch.tensor([job["prompt"]])
    lengths = {name: job[name] for name in ("steps", "gen_length", "block_length")}
    functions = {
        "none": official.generate,
        "prefix": official.generate_with_prefix_cache,
        "dual": official.generate_with_dual_cache,
    }

    def generate(cache: str) -> tuple[list[int], int]:
        canvas, forwards = functions[cache](model, prompt, mask_id=job["mask_id"], **lengths)
        return canvas[0, prompt.shape[1] :].tolist(), int(forwards)

    return generate


def bonsai(job: dict[str, Any]) -> Generate:
    """jax-ml/bonsai's LLaDA in Flax, whose steps are calls from Python."""
    sys.path.insert(0, job["checkout"])
    import jax
    import jax.numpy as jnp
    import numpy as np
    from bonsai.models.llada import modeling, params

    hub = json.loads(Path(job["hub"], "config.json").read_text())
    same = ("d_model", "n_heads", "n_kv_heads", "n_layers", "max_sequence_length", "rope_theta", "vocab_size")
    config = modeling.ModelConfig(
        **{
            name: hub[name] for name in (*same, "include_bias", "include_qkv_bias", "embedding_size", "mlp_hidden_size")
        },
        dtype=jnp.float32,
        embedding_dropout=0.0,
        return_hidden_states=False,
        rms_norm_eps=hub["rms_norm_eps"],
        shd_cfg=modeling.ShardingConfig.no_sharding(),
    )
    jax.set_mesh(jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Explicit,) * 2))
    model = params.create_llada_from_pretrained(job["hub"], config)
    prompt = jnp.asarray([job["prompt"]], jnp.int32)
    lengths = {name: job[name] for name in ("steps", "gen_length", "block_length")}

    def generate(cache: str) -> tuple[list[int], int]:
        canvas = modeling.generate(model, prompt, jnp.ones_like(prompt, bool), mask_id=job["mask_id"], **lengths)
        return np.asarray(canvas)[0, prompt.shape[1] :].tolist(), job["steps"]

    return generate


def bonsai_jit(job: dict[str, Any]) -> Generate:
    """The same with its forward under `nnx.jit`, as a user would speed it up."""
    generate = bonsai(job)
    from bonsai.models.llada import modeling
    from flax import nnx

    modeling.forward = nnx.jit(modeling.forward)
    return generate


ENGINES: dict[str, Callable[[dict[str, Any]], Generate]] = {
    "ours": ours,
    "fast-dllm": fast_dllm,
    "bonsai": bonsai,
    "bonsai-jit": bonsai_jit,
}


def timed(generate: Generate, cache: str) -> dict[str, Any]:
    """A generation, its wall time, and the CPU time of all of this process's threads."""
    wall, cpu = time.perf_counter(), time.process_time()
    tokens, forwards = generate(cache)
    seconds = {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
    return {"tokens": tokens, "forwards": forwards, **seconds}


def main() -> None:
    """Loads, then answers until there is no more to read."""
    engine, job = sys.argv[1], json.loads(sys.argv[2])
    os.sched_setaffinity(0, {job["core"]})  # before anything counts cores
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what implementations print is no answer

    def answer(values: dict[str, Any]) -> None:
        print(json.dumps(values), file=answers, flush=True)

    try:
        generate = ENGINES[engine](job)
        answer({"versions": {name: version(name) for name in PACKAGES[engine]}})
        for line in sys.stdin:
            answer(timed(generate, json.loads(line)["cache"]))
    except Exception as error:  # the asking process reports it
        answer({"error": f"{type(error).__name__}: {error}".splitlines()[0]})


if __name__ == "__main__":
    main()
