"""The golden cases of adaptive parallel decoding: the same noise, the same accepted tokens."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import official
from golden_base import Assets, Case, check, generate

from samplers import APD, LeftRight, Sampling, Verifier, stop_on
from samplers.text.prompts import bucket_length

GEN, WINDOW = 64, 32


def run(case: Case, assets: Assets) -> None:
    args, expected = case["args"], case["expected"]
    vocab_size = assets.model(case["checkpoint"]).denoiser.vocab_size
    result = generate(case, assets, _sampler(case, assets, vocab_size), _noise(args, assets))
    check(result, case)
    if args["sampler"] == "apd":
        assert result.verifier_forwards.tolist() == [expected["nfe"]]
        assert result.most_accepted.tolist() == [max(expected["accepted"])]
        np.testing.assert_allclose(result.mean_accepted, [np.mean(expected["accepted"])], rtol=1e-6)


def _sampler(case: Case, assets: Assets, vocab_size: int) -> APD | LeftRight:
    """Numbers are data and rooms are common, so that cases share programs."""
    args = case["args"]
    room, window = max(GEN, bucket_length(args["gen_length"])), args["kv_window"]
    options: dict[str, Any] = {
        "gen_length": room,
        "window": None if window is None else jnp.asarray(window),
        "most_window": None if window is None else max(WINDOW, window),
        "lookahead": jnp.asarray(args["max_lookahead"] or room),
        "most_lookahead": max(room, args["max_lookahead"] or 0),
        "sampling": Sampling(temperature=args["temperature"] or None, top_p=args["top_p"], top_k=args["top_k"]),
        "stop": stop_on([args["eos_id"]], vocab_size=vocab_size),
    }
    if args["sampler"] == "leftright":
        return official.LeftRight(tokens_per_step=jnp.asarray(args["tokens_per_step"]), **options)
    verifier = Verifier(assets.model(case["verifier"]).denoiser)
    kind = {"coupled": APD, "greedy": functools.partial(official.APD, noise="none")}[args["target"]]
    return kind(verifier, weight=args["mixture_weight"], **options)


def _noise(args: dict, assets: Assets) -> official.TableNoise | None:
    """Draws [steps, lookahead, V]: iteration i reads entry (first + i) of the recorded ones, around their end."""
    if not args["temperature"]:
        return None
    recorded = np.load(assets.path("apd_noise.npz"))["u16"]
    index = (args["noise_first_iteration"] + np.arange(args["gen_length"])) % len(recorded)
    uniform = (recorded[index].astype(np.float32) + 0.5) / 65536
    room = max(GEN, bucket_length(args["gen_length"]))
    steps = np.pad(uniform, [(0, room - len(uniform)), (0, 0), (0, 0)], constant_values=0.5)
    return official.TableNoise(tokens=jnp.asarray(steps))
