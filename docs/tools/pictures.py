"""The pictures of docs/concepts.md and docs/papers: what forwards write, and which positions they run.

Everything in them is read off generations of embedded models, and of the tiny checkpoints that the goldens were
recorded on; nothing is drawn by hand. Those checkpoints know little, and are there to show a mechanism. D2F's student
is trained on the way:

    python -m docs.tools.pictures --out docs/images            # ten minutes on two busy CPU cores
    python -m docs.tools.pictures --out docs/images caches     # that one alone
"""

import argparse
import dataclasses
import io
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import convert
import dllm_jax
from benchmarks.command import status_of
from convert import embedded
from dllm_jax import DllmError, Model
from dllm_jax.models.denoiser import Denoiser, Span
from dllm_jax.pytree import pytree
from dllm_jax.storage import write_file
from samplers import generate
from samplers.engine.requests import Update, requests_of
from samplers.engine.runner import run_all
from samplers.generate import prepare
from samplers.viewer.colors import colour_at
from samplers.viewer.timeline import WRITTEN, Timeline, page_text, timeline_of
from samplers.viewer.view import View, view_of
from train import merge_adapters, read_config, train

ROOT = Path(__file__).parents[2]
TINY, CONFIGS = ROOT / "tests" / "goldens" / "checkpoints", ROOT / "train" / "configs"
STUDENT = "steps=200 optimizer.lr=2e-3 optimizer.batch=32 optimizer.warmup=20 optimizer.final_ratio=0.05".split()

QUESTION = "Q: Eve has 12 pears. Eve finds 9. Eve shares equally among 3. Eve gets 4 times as many. Eve loses 11.\nA: "
SHORT = "Q: Eve has 12 pears. Eve finds 9. Eve loses 11.\nA: "


@pytree(static=("config", "layout", "scan"))
class _Noted(Denoiser):
    """A denoiser that reports the positions of every forward."""

    def forward(self, inputs: jax.Array, visible: jax.Array, *, at: Any = None, **options: Any) -> Any:
        if at is None:
            positions = jnp.broadcast_to(jnp.arange(inputs.shape[1]), inputs.shape[:2])
        else:
            positions = at.positions if isinstance(at, Span) else at
        jax.debug.callback(_note, positions, jnp.max(visible))
        return super().forward(inputs, visible, at=at, **options)


_NOTES: list[np.ndarray] = []


def _note(positions: Any, visible: Any) -> None:
    """Keeps the positions of a forward of one row, except invisible ones."""
    positions = np.asarray(positions).ravel()
    _NOTES.append(positions[positions < int(visible)])


@dataclasses.dataclass(frozen=True, eq=False)
class _NotedModel(Model):
    """A model with such a denoiser."""

    @property
    def denoiser(self) -> Denoiser:
        return _Noted(self.config, self.params, self.layout)


class Steps(NamedTuple):
    """What N forwards did on P positions of a prompt and G of a canvas.

    Attributes:
        ran: [N, P + G] bool, positions that the forward ran.
        written: [P + G] the forward, from 0, that wrote the position last; -1 for none.
        texts: of the canvas, "" where nothing was written.
        prompt: P.
        borders: positions after the canvas's first where a block begins.
    """

    ran: np.ndarray
    written: np.ndarray
    texts: list[str]
    prompt: int
    borders: list[int]


def steps_of(model: Model, prompt: str, spec: str, gen_length: int, **options: Any) -> Steps:
    """A generation by single steps, with the positions that every forward ran."""
    noted = _NotedModel(**{field.name: getattr(model, field.name) for field in dataclasses.fields(model)})
    sampler, rows, keys = prepare(noted, [prompt], sampler=spec, gen_length=gen_length, **options)
    request = requests_of(sampler, rows, keys)[0]
    start, length, forwards = len(request.prompt), len(request.prompt) + gen_length, list[np.ndarray]()
    _NOTES.clear()

    def keep_positions(update: Update) -> None:
        jax.effects_barrier()
        if update.nfe > len(forwards):
            forwards.append(np.isin(np.arange(length), np.concatenate(_NOTES)))
            _NOTES.clear()

    list(run_all(noted, sampler, [request], trace=True, on_update=keep_positions)[1])
    timeline, at = timeline_of(request.generation), np.asarray(request.generation.decoded_at)
    texts = {change.position: page_text(change.text) for frame in timeline.frames for change in frame}
    own = [texts[i] if at[i] >= 0 else "" for i in range(gen_length)]
    first = 0 if getattr(sampler, "align_blocks", False) else start
    borders = [border for border in range(first, length, sampler.width) if border > start]
    return Steps(np.stack(forwards), np.concatenate([np.full(start, -1), at]), own, start, borders)


def draw(panels: Sequence[tuple[str, Steps]]) -> bytes:
    """Forwards from top to bottom, positions from left to right, one panel below the other."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    longest = max(len(steps.ran) for _, steps in panels)
    rows = [max(len(steps.ran), 4) + 3 for _, steps in panels]
    figure = Figure(figsize=(9.6, 0.16 * sum(rows) + 0.5), dpi=100, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (name, steps) in zip(_column(figure, rows), panels, strict=True):
        _panel(axes, name, steps, longest)
    colours = {"run": RUN, "run, and still a mask": MASKS, "written": _rgb(colour_at(0.0).ground), "not run": NOT_RUN}
    patches = [Patch(facecolor=colour, edgecolor="#999999", label=label) for label, colour in colours.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, fontsize=8)
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return _small(file.getvalue())


MOST_PROMPT = 20
CENTRED: dict[str, Any] = {"fontsize": 8, "ha": "center", "va": "top"}
NOT_RUN, RUN, MASKS = (1.0, 1.0, 1.0), (0.87, 0.86, 0.83), (0.70, 0.69, 0.66)


def _column(figure: Any, rows: Sequence[int]) -> Sequence[Any]:
    found = figure.subplots(len(rows), 1, height_ratios=rows, squeeze=False)
    return [axes for row in found for axes in row]


def _rgb(colour: tuple[int, int, int]) -> tuple[float, float, float]:
    red, green, blue = (part / 255 for part in colour)
    return red, green, blue


def _panel(axes: Any, name: str, steps: Steps, longest: int) -> None:
    """One generation; what a forward wrote has the viewer's colour of that forward."""
    count, length = steps.ran.shape
    picture = np.ones((count, length, 3))
    for forward in range(count):
        open_now = (np.arange(length) >= steps.prompt) & ((steps.written >= forward) | (steps.written < 0))
        picture[forward][steps.ran[forward]] = RUN
        picture[forward][steps.ran[forward] & open_now] = MASKS
        picture[forward][steps.written == forward] = _rgb(colour_at(forward / max(longest - 1, 1)).ground)
    axes.imshow(picture, aspect="auto", interpolation="nearest", extent=(0, length, count, 0))
    for border in steps.borders:
        axes.axvline(border, color="#555555", linewidth=0.8, linestyle=":")
    axes.axvline(steps.prompt, color="black", linewidth=1.2)
    for forward in range(1, count):
        axes.axhline(forward, color="white", linewidth=0.8)
    work = f"{count} forwards, {int(steps.ran.sum())} positions run"
    axes.set_title(f"{name}: {work}", fontsize=9, loc="left", pad=3)
    axes.set_yticks([0.5, count - 0.5] if count > 1 else [0.5], ["1", str(count)] if count > 1 else ["1"], fontsize=7)
    axes.set_xticks([i + 0.5 for i in range(steps.prompt, length)], steps.texts, fontsize=8, family="monospace")
    left = max(steps.prompt - MOST_PROMPT, 0)
    axes.set_xlim(left, length)
    axes.text((left + steps.prompt) / 2, count * 1.02, "the prompt's end" if left else "prompt", **CENTRED)
    axes.tick_params(length=0, pad=1)


def _small(png: bytes) -> bytes:
    """The picture with a palette, a third of the bytes."""
    from PIL import Image

    file = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGB").quantize(64, dither=Image.Dither.NONE).save(file, "PNG", optimize=True)
    return file.getvalue()


# The pictures --------------------------------------------------------------------------------------------------------


def _saved(view: View) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return _small(view.save(Path(folder) / "view.png").read_bytes())


def tiny(family: str, folder: Path) -> Path:
    """A golden's checkpoint of a family, converted."""
    name = f"{family.replace('-', '')}-tiny"
    if not (folder / name).is_dir():
        convert.convert(family, TINY / name, folder / name)
    return folder / name


def _cut(timeline: Timeline, forwards: int) -> Timeline:
    """The timeline after so many forwards."""
    frames = timeline.frames[: forwards + 1]
    written = sum(change.kind == WRITTEN for frame in frames for change in frame)
    return dataclasses.replace(timeline, name=f"after forward {forwards}", frames=frames, tokens=written)


def canvas(_: Path) -> bytes:
    """One generation at four moments."""
    model = embedded.load("word-problems")
    spec = "topk:k=2,cache=none,block_length=0"
    timeline = timeline_of(generate(model, QUESTION, sampler=spec, gen_length=32, trace=True))
    return _saved(View([_cut(timeline, k) for k in (2, 6, 10, timeline.forwards)], "forward"))


def rules(_: Path) -> bytes:
    """Four rules on one problem."""
    model = embedded.load("word-problems")
    named = {
        "topk:k=1, one token per forward": "topk:k=1",
        "topk:k=4, four": "topk:k=4",
        "threshold:threshold=0.9": "threshold:threshold=0.9",
        "eb:gamma=0.01": "eb:gamma=0.01",
    }
    plain = {"cache": "none", "block_length": 0, "gen_length": 32}
    answers = [generate(model, QUESTION, sampler=spec, trace=True, **plain) for spec in named.values()]
    return _saved(view_of(answers, list(named)))


def caches(_: Path) -> bytes:
    """What a forward runs under four cache policies."""
    model = embedded.load("word-problems")
    policies = ("none", "prefix", "dual", "vicinity,prefix_look=4,after_look=4,warmup=2")
    specs = [f"topk:k=2,block_length=8,cache={policy}" for policy in policies]
    return draw([(spec.partition("block_length=8,")[2], steps_of(model, SHORT, spec, 32)) for spec in specs])


def student(folder: Path) -> Path:
    """The embedded word problems' D2F student, trained for a few minutes."""
    base, out = embedded.install("word-problems"), folder / "student"
    if not (out / "merged").is_dir():
        settings = [f"model.init={base}", f"out={out}", *STUDENT]
        run = train(read_config(CONFIGS / "d2f-word-problems.toml", settings, "d2f"))
        merge_adapters(base, run.folder, out / "merged")
    return out / "merged"


def pipeline(folder: Path) -> bytes:
    """D2F: several blocks in flight, and one at a time."""
    model, panels = dllm_jax.load(student(folder)), []
    sure = "d2f:block_length=8,threshold=0.9995"  # so that a block of this easy text takes several forwards
    for spec in (f"{sure},tau_add=1", f"{sure},tau_add=0.1"):
        steps = steps_of(model, QUESTION, spec, 32)
        steps.ran[0, steps.borders[0] :] = False  # room that the program has for longer prompts
        panels.append((spec, steps))
    return draw(panels)


def apd(folder: Path) -> bytes:
    """APD and its baseline, by the goldens' checkpoints."""
    model, verifier = dllm_jax.load(tiny("dream", folder)), dllm_jax.load(tiny("qwen2", folder))
    prompt = "Q: Eve has 58 cards. Eve gives 18.\nA: "
    panels = [("leftright:tokens_per_step=1", steps_of(model, prompt, "leftright:tokens_per_step=1", 24))]
    for spec in ("apd:weight=0.5", "apd:weight=0.5,window=4,lookahead=8"):
        panels.append((spec, steps_of(model, prompt, spec, 24, verifier=verifier)))
    return draw(panels)


def edits(folder: Path) -> bytes:
    """LLaDA2.1's editing, and the same thresholds without, by the goldens' checkpoint."""
    model = dllm_jax.load(tiny("llada2", folder))
    prompt = "Q: Tom has 39 apples. Tom buys 5. Tom buys 8.\nA: "
    specs = {"threshold 0.3, nothing is edited": 1.1, "threshold 0.3, editing threshold 0.5": 0.5}
    shape: dict[str, Any] = {"gen_length": 32, "block_length": 16, "trace": True}
    named = {
        name: generate(model, prompt, rule="edit", threshold=0.3, editing_threshold=least, **shape)
        for name, least in specs.items()
    }
    return _saved(view_of(list(named.values()), list(named)))


PICTURES: dict[str, Callable[[Path], bytes]] = {
    "canvas": canvas,
    "rules": rules,
    "caches": caches,
    "pipeline": pipeline,
    "apd": apd,
    "edits": edits,
}


def make(names: Sequence[str], out: Path, work: Path | None) -> Iterator[Path]:
    """Makes pictures, and yields the files one by one; models are kept in `work` if there is one."""
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            path = out / f"concept-{name}.png"
            write_file(path, PICTURES[name](work or Path(folder)))
            yield path


def main(arguments: Sequence[str] | None = None) -> int:
    """Draws what the command line says; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m docs.tools.pictures", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"among {', '.join(PICTURES)} (default: all)")
    parser.add_argument("--out", type=Path, required=True, help="folder, which must exist")
    parser.add_argument("--work", type=Path, help="folder for the models, which must exist (default: kept nowhere)")
    options = parser.parse_args(arguments)
    return status_of(lambda: _draw(options))


def _draw(options: argparse.Namespace) -> None:
    if unknown := [name for name in options.names if name not in PICTURES]:
        raise DllmError(f"no picture is called {unknown[0]!r}; choose among {', '.join(PICTURES)}")
    for folder in filter(None, (options.out, options.work)):
        if not folder.is_dir():
            raise DllmError(f"the folder {folder} does not exist; make it")
    for path in make(options.names or list(PICTURES), options.out, options.work):
        print(path, f"{path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    sys.exit(main())
