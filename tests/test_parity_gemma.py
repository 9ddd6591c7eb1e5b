"""DiffusionGemma against transformers: a small model with random weights, float32, CPU. See `make parity`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import convert
import dllm_jax
from dllm_jax.families import FAMILIES, HubConfig
from dllm_jax.models.denoiser import Span
from dllm_jax.pytree import pytree
from samplers import Renoise, sample_jit, stop_on
from samplers.tokens.noise import Purpose
from train.losses import Batch
from train.objectives.uniform_diffusion import UniformDiffusion, UniformDiffusionPart

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TOLERANCE = 5e-5  # on logits whose standard deviation is about 1.5
VOCAB, CANVAS, WINDOW, PROMPT = 101, 8, 6, 13  # a prompt longer than the window, as is a canvas


@pytest.fixture(scope="module")
def theirs():
    """Every weight is random: transformers' own initialiser leaves norms, scales and scalars one."""
    text = transformers.DiffusionGemmaTextConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        global_head_dim=24,
        num_global_key_value_heads=1,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
        num_experts=5,
        top_k_experts=2,
        moe_intermediate_size=20,
        max_position_embeddings=256,
    )
    small = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=8)
    vision = transformers.Gemma4VisionConfig(num_key_value_heads=2, **small)
    config = transformers.DiffusionGemmaConfig(text_config=text, vision_config=vision, canvas_length=CANVAS)
    model = transformers.DiffusionGemmaForBlockDiffusion(config).eval()
    model.set_attn_implementation("sdpa")  # the eager one cannot generate where there is padding
    generator, done = torch.Generator().manual_seed(7), set()
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), *model.named_buffers()]:
            if "vision" in name or name.endswith(("inv_freq", "embed_scale")) or weight.data_ptr() in done:
                continue
            done.add(weight.data_ptr())
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.2 * noise if "norm" in name or "scal" in name else noise / (4 if "embed" in name else 8))
    return model


@pytest.fixture(scope="module")
def ours(theirs, tmp_path_factory):
    """The same weights, converted from what transformers saves."""
    folder = tmp_path_factory.mktemp("gemma")
    theirs.save_pretrained(folder / "saved")
    convert.convert("diffusion-gemma", folder / "saved", folder / "ours")
    return dllm_jax.load(folder / "ours")


def random_tokens(seed, length, batch=2):
    return np.random.default_rng(seed).integers(2, VOCAB, (batch, length), dtype=np.int32)


def assert_close(ours, theirs):
    np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=0, atol=TOLERANCE)


def long(array):
    return torch.tensor(np.asarray(array)).long()


def step_of(theirs, prompt, canvas, **options):
    with torch.no_grad():
        return theirs(input_ids=long(prompt), decoder_input_ids=long(canvas), **options)


def buffers(denoiser, prompt, lengths, total):
    """What the encoder makes of prompts, in buffers with room for a canvas."""
    hidden, kv = denoiser.forward(prompt, lengths)
    empty = denoiser.empty_cache(len(prompt), total)
    return hidden, jax.tree.map(lambda buffer, new: buffer.at[:, : prompt.shape[1]].set(new), empty, kv)


def test_encoder_and_one_step(theirs, ours):
    """Of the encoder's hidden states, and of the decoder's logits with and without those of a step before."""
    prompt, canvas = random_tokens(0, PROMPT), random_tokens(1, CANVAS)
    before = 3 * torch.randn(2, CANVAS, VOCAB, generator=torch.Generator().manual_seed(0))
    first, second = step_of(theirs, prompt, canvas), step_of(theirs, prompt, canvas, self_conditioning_logits=before)
    assert 0.5 < first.logits.std() < 5 and (first.logits - second.logits).abs().max() > 1
    denoiser, lengths = ours.denoiser, jnp.full((2,), PROMPT, jnp.int32)
    hidden, kv = buffers(denoiser, jnp.asarray(prompt), lengths, PROMPT + CANVAS)
    assert_close(denoiser.final_hidden(hidden), first.encoder_last_hidden_state)
    decode = lambda soft: denoiser.logits(denoiser.denoise(jnp.asarray(canvas), soft, lengths, kv)[0])
    assert_close(decode(jnp.zeros((2, CANVAS, 32))), first.logits)
    assert_close(decode(denoiser.expected_embedding(jnp.asarray(before.numpy()))), second.logits)


def test_canvases_at_other_places_in_a_batch(theirs, ours):
    """Prompts of several lengths, shorter than the window and longer, and a finished canvas that the encoder reads."""
    denoiser, lengths = ours.denoiser, jnp.array([PROMPT, 3], jnp.int32)
    prompt, old, canvas = random_tokens(2, PROMPT), random_tokens(3, CANVAS), random_tokens(4, CANVAS)
    _, kv = buffers(denoiser, jnp.asarray(prompt), lengths, PROMPT + 2 * CANVAS)
    _, kv = denoiser.denoise(jnp.asarray(canvas), jnp.zeros((2, CANVAS, 32)), lengths, kv)  # leaves noise there
    rows = [np.concatenate([prompt[row, :length], old[row]]) for row, length in enumerate(np.asarray(lengths))]
    tokens = jnp.asarray(np.stack([np.pad(row, (0, PROMPT + 2 * CANVAS - len(row))) for row in rows]))
    _, kv = denoiser.forward(tokens, lengths + CANVAS, at=Span(lengths, CANVAS), kv=kv)
    hidden, _ = denoiser.denoise(jnp.asarray(canvas), jnp.zeros((2, CANVAS, 32)), lengths + CANVAS, kv)
    for row, known in enumerate(rows):
        assert_close(denoiser.logits(hidden)[row], step_of(theirs, known[None], canvas[row : row + 1]).logits[0])


@pytree()
class Recorded:
    """Uniforms by row and forward: of tokens [B, N, L, V], and of what a canvas is filled with [B, N + 1, L]."""

    tokens: jax.Array
    canvas: jax.Array

    def uniform(self, purpose, step, positions, ids=None):
        table = self.tokens if purpose == Purpose.TOKENS else self.canvas
        found = jax.vmap(lambda row, at: row[at])(table, jnp.minimum(step, table.shape[1] - 1))
        return found if ids is None else found[..., ids]


class Draws:
    """Stands for torch's random numbers while transformers generates, and keeps the uniforms that it gave."""

    def __init__(self, monkeypatch):
        self.random, self.last, self.canvases = np.random.default_rng(0), None, []
        monkeypatch.setattr(torch, "randint", self.randint)
        monkeypatch.setattr(torch, "multinomial", self.multinomial)
        step = transformers.DiffusionGemmaForBlockDiffusion._denoising_step

        def watched(model, *args, **options):
            busy = ~options["finished_denoising"].numpy().copy()
            start = self.last
            answer = step(model, *args, **options)
            self.canvases[-1].append((start, self.drawn, self.last, busy))
            return answer

        monkeypatch.setattr(transformers.DiffusionGemmaForBlockDiffusion, "_denoising_step", watched)
        prepare = transformers.DiffusionGemmaForBlockDiffusion._prepare_denoiser_inputs

        def entered(model, **options):
            self.canvases.append([])
            return prepare(model, **options)

        monkeypatch.setattr(transformers.DiffusionGemmaForBlockDiffusion, "_prepare_denoiser_inputs", entered)

    def _uniform(self, shape):
        return np.clip(self.random.random(shape, np.float32), 1e-6, 1 - 1e-6)

    def randint(self, low, high, size, device=None):
        self.last = self._uniform(size)
        return torch.tensor((self.last * high).astype(np.int64))

    def multinomial(self, probabilities, num_samples):
        self.drawn = self._uniform(tuple(probabilities.shape)).reshape(-1, CANVAS, VOCAB)
        gumbel = -np.log(-np.log(self.drawn)).reshape(probabilities.shape)
        return torch.argmax(torch.log(probabilities) + torch.tensor(gumbel), dim=-1, keepdim=True)

    def of_rows(self, batch):
        """As `Recorded`, each row's own forwards one after the other; and how many it had in each canvas."""
        tokens, canvas, counts = [], [], []
        for row in range(batch):
            steps = [[step for step in steps if step[3][row]] for steps in self.canvases]
            every = [step for own in steps for step in own]
            tokens.append([step[1][row] for step in every])
            canvas.append([step[0][row] for step in every])
            counts.append([len(own) for own in steps])
        longest = max(map(len, tokens))
        fill = lambda rows: np.stack([np.stack([*row, *[row[-1]] * (longest - len(row))]) for row in rows])
        return Recorded(jnp.asarray(fill(tokens)), jnp.asarray(fill(canvas))), counts


@pytest.mark.parametrize("stability", [0, 1, 2])
def test_generations(theirs, ours, stability, monkeypatch):
    """Whole generations of three canvases, from prompts of two lengths, token for token with the same uniforms."""
    draws, lengths = Draws(monkeypatch), np.array([PROMPT, 5])
    prompt = random_tokens(5 + stability, PROMPT)
    mask = np.arange(PROMPT) >= PROMPT - lengths[:, None]  # transformers pads on the left
    left = np.stack([np.roll(row, PROMPT - length) for row, length in zip(prompt, lengths, strict=True)])
    settings = dict(t_min=0.01, t_max=0.1, stability_threshold=stability, confidence_threshold=0.3)
    config = transformers.models.diffusion_gemma.generation_diffusion_gemma
    found = theirs.generate(
        long(left),
        attention_mask=torch.tensor(mask),
        max_new_tokens=3 * CANVAS,
        max_denoising_steps=9,
        sampler_config=config.EntropyBoundSamplerConfig(entropy_bound=1.0),
        pad_token_id=0,
        eos_token_id=1,
        **settings,
    )
    recorded, counts = draws.of_rows(2)
    sampler = Renoise(3 * CANVAS, CANVAS, 9, 1.0, 0.1, 0.01, stability, 0.3, stop=stop_on([1], vocab_size=VOCAB))
    result = sample_jit(sampler, ours.denoiser, jnp.asarray(prompt), jnp.asarray(lengths), noise=recorded)
    assert len({count for own in counts for count in own}) > 1  # canvases end early, and at different steps
    for row, length in enumerate(np.asarray(result.lengths)):
        wanted = found.sequences[row, PROMPT:].numpy()
        np.testing.assert_array_equal(result.tokens[row, :length], wanted[:length])
        canvases = min(-(-(length + 1) // CANVAS), 3)
        assert length == len(wanted) or wanted[length] == 1
        assert result.nfe[row] == sum(counts[row][:canvases])
        assert result.cache_updates[row] == canvases


def test_training(theirs, ours):
    """Both losses of uniform-diffusion and their gradients, written out with what transformers' model returns."""
    part = UniformDiffusionPart(next_token=0.5)
    objective, denoiser, total = UniformDiffusion(part), ours.denoiser, PROMPT + 2 * CANVAS
    tokens, place = jnp.asarray(random_tokens(10, total, batch=4)), jnp.arange(total)
    batch = Batch(tokens, jnp.broadcast_to(place >= PROMPT, tokens.shape), jnp.full((4,), total, jnp.int32))
    noised = objective.corrupt(jax.random.key(1), batch, denoiser)
    assert len(set(noised.start.tolist())) == len(set(noised.conditioned.tolist())) == 2
    of = lambda params: objective.loss(dataclasses.replace(denoiser, params=params), denoiser, noised)[0]
    value, gradient = jax.value_and_grad(of)(dict(ours.params))

    theirs.zero_grad()
    entropy, wanted = torch.nn.functional.cross_entropy, 0.0
    for row, start in enumerate(noised.start.tolist()):
        inputs, canvas, own = long(noised.inputs[row])[None], long(noised.canvas[row]), long(tokens[row])[None]
        run = lambda own=own, start=start, inputs=inputs, **options: theirs(
            input_ids=own[:, :start], decoder_input_ids=inputs, **options
        )
        with torch.no_grad():
            first = run().logits
        mask = torch.tensor([bool(noised.conditioned[row])])
        logits = run(self_conditioning_logits=first, self_conditioning_mask=mask).logits
        read = theirs.lm_head(theirs(input_ids=own, decoder_input_ids=inputs).encoder_last_hidden_state)[0, :-1]
        wanted = wanted + entropy(logits[0], canvas) / 4
        wanted = wanted + 0.5 * entropy(30 * torch.tanh(read / 30), own[0, 1:]) / 4
    wanted.backward()
    np.testing.assert_allclose(value, wanted.item(), rtol=1e-5)
    layers, decoder = theirs.model.decoder.layers, theirs.model.decoder
    pairs = {
        "embed.embedding": decoder.embed_tokens.weight.grad,
        "conditioning.mlp.down_proj.kernel": decoder.self_conditioning.down_proj.weight.grad.T,
        "final_norm.scale": decoder.norm.weight.grad,
    }
    for number, layer in enumerate(layers):
        pairs[f"layers.{number}.attn.q_proj.kernel"] = layer.self_attn.q_proj.weight.grad.T
        pairs[f"layers.{number}.attn.k_proj.kernel"] = layer.self_attn.k_proj.weight.grad.T
        pairs[f"layers.{number}.moe.router"] = layer.router.proj.weight.grad.T
        pairs[f"layers.{number}.moe.w_out"] = layer.experts.down_proj.grad.transpose(1, 2)
        pairs[f"layers.{number}.attn_norm.scale"] = layer.input_layernorm.weight.grad
    for name, found in pairs.items():
        scale = found.abs().max().item()
        assert scale > 0
        np.testing.assert_allclose(gradient[name], found.numpy(), rtol=0, atol=2e-4 * scale, err_msg=name)


def test_saved_and_back(theirs, ours, tmp_path):
    """What we write, transformers loads: with the config of the source, and with one of our own."""
    prompt, canvas = random_tokens(8, PROMPT), random_tokens(9, CANVAS)
    convert.export(ours.folder, tmp_path / "back")
    again = transformers.DiffusionGemmaForBlockDiffusion.from_pretrained(tmp_path / "back", local_files_only=True)
    assert_close(step_of(again.eval(), prompt, canvas).logits, step_of(theirs, prompt, canvas).logits)
    written = FAMILIES["diffusion-gemma"].write_config(ours.config)
    config = transformers.DiffusionGemmaConfig.from_dict(written)
    own = FAMILIES["diffusion-gemma"].read_config(HubConfig(config.to_dict(), "config.json"))
    assert own == dataclasses.replace(ours.config, dtype=own.dtype)
