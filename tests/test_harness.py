"""lm-evaluation-harness over local tasks (tests/harness): its own code asks, ours answers."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("lm_eval")

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.api.model import CachingLM
from lm_eval.tasks import TaskManager

import dllm_jax
import evals
from convert import embedded
from dllm_jax import DllmError
from dllm_jax.text.tokenizer import chat_text, encode_text
from evals import presets
from evals.__main__ import main
from evals.harness import forms
from evals.harness import model as harness_model
from evals.harness.answers import fingerprint
from evals.harness.model import DllmLM
from evals.presets import Preset, PublishedScore
from samplers.likelihood.scoring import Score

TASKS = Path(__file__).parent / "harness"
TINY = "topk:k=4,gen_length=16,block_length=8"


@pytest.fixture(autouse=True)
def local(monkeypatch, tmp_path_factory):
    """Data paths are relative to the working directory; nothing is kept in the home folder, nor asked of the hub."""
    monkeypatch.chdir(TASKS)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.getbasetemp() / "datasets")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """The embedded model of word problems."""
    return dllm_jax.load(embedded.install("word-problems", tmp_path_factory.mktemp("home") / "word-problems"))


@pytest.fixture(scope="module")
def dream_with_bos(dream_tiny, tmp_path_factory):
    """The tiny Dream, whose tokenizer names a start token as the published one does."""
    folder = tmp_path_factory.mktemp("bos") / "dream-tiny"
    shutil.copytree(dream_tiny.folder, folder)
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<|endoftext|>"}')
    return dllm_jax.load(folder)


def own(sampler=TINY, form="raw", **changes):
    return presets.select(None, sampler, form, changes)[0]


def likely(**options):
    return Preset("likely", "", "", None, "raw", kind="likelihood", **options)


def evaluated(lm, *tasks, **options):
    manager = TaskManager(include_path=str(TASKS), include_defaults=False)
    told = forms.arguments_of(lm.preset.form) | {"num_fewshot": lm.preset.shots} | options
    return lm_eval.simple_evaluate(lm, tasks=list(tasks), task_manager=manager, bootstrap_iters=0, **told)


def problems():
    return [json.loads(line) for line in (TASKS / "test.jsonl").read_text().splitlines()]


def asked(texts, **kwargs):
    """Requests for the answers to texts, as the harness makes them."""
    return [
        Instance("generate_until", {"text": text}, (text, {"until": [], **kwargs}), 0, ("made", i, 1))
        for i, text in enumerate(texts)
    ]


# Numbers -------------------------------------------------------------------------------------------------------------


def test_the_harness_evals_and_a_count_by_hand_agree(words):
    sampler = "threshold:threshold=0.5,gen_length=48"
    kinds = ("ni", "apd", "fast-dllm-llada", "d2f-llada", "d3llm")
    lm = DllmLM(words, own(sampler), counts=kinds, progress=False)
    found = evaluated(lm, "words")
    theirs = found["results"]["words"]["exact_match,answer"]
    ours = evals.run(words, "word-problems", sampler, n=32, counts=kinds, progress=False)
    texts = {sample["doc_id"]: sample["resps"][0][0] for sample in found["samples"]["words"]}
    answers = [re.search(r"#### (\d+)$", texts[i]) for i in range(32)]
    pairs = zip(answers, problems(), strict=True)
    by_hand = sum(match is not None and match[1] == problem["answer"] for match, problem in pairs)
    assert 0 < by_hand < 32  # so that equal numbers mean something
    assert theirs == ours.accuracy == by_hand / 32
    assert [texts[row.index] for row in ours.rows] == [row.text for row in ours.rows]
    counts = found["config"]["dllm_jax"]["counts"]
    assert counts == lm.counts()
    names = ("nfe", "nfe_stderr", "full_forwards", "tokens", "tokens_per_forward", "committed_per_forward")
    np.testing.assert_allclose([counts[name] for name in names], [getattr(ours, name) for name in names])
    for kind in kinds:  # the library's own scoring counts its rows
        pairs = zip(counts["compat_count"][kind].items(), ours.compat_count[kind].items(), strict=True)
        assert [one for one, two in pairs if one != two and one[0] != "tokens_per_second"] == []


def test_multiple_choice_is_a_comparison_of_likelihoods(words):
    lm = DllmLM(words, likely(samples=1), progress=False)
    found = evaluated(lm, "words_choice", limit=2)
    for sample in found["samples"]["words_choice"]:
        scores = [float(response[0][0]) for response in sample["resps"]]
        assert sample["acc"] == (np.argmax(scores) == sample["doc"]["label"]) == 1
        assert len(set(scores)) == 4 and max(scores) < 0
    assert found["results"]["words_choice"]["acc,none"] == 1.0
    assert lm.counts() == {"likelihoods": 8, "forwards": 8}


def test_likelihoods_by_a_setting_of_ones_own(words, capsys):
    flags = ["--tasks", "words_choice", "--include-path", ".", "--limit", "1", "--set", "samples=1,form=raw"]
    assert main(["lm", "--model", str(words.folder), *flags]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"own +words_choice +0 +acc,none +100.00", printed) and "kind" in printed


@pytest.mark.parametrize("family, form, sampler", [
    ("llada_tiny", "chatN", "threshold:threshold=0.6,cache=dual,gen_length=16,block_length=8"),
    ("dream_with_bos", "raw", "dream:temperature=0.2,top_p=0.95,gen_length=16"),
])  # fmt: skip
def test_a_preset_of_a_family_end_to_end(family, form, sampler, request, monkeypatch, tmp_path, capsys):
    """A tiny converted model, from the command line to the table."""
    model = request.getfixturevalue(family)
    bos = int(family == "dream_with_bos")
    metrics = {"metrics": ("exact_match,answer",), "published": (PublishedScore(50.0),)}
    preset = Preset(f"{family}/words", model.name, "words_shots", 2, form, bos, sampler=sampler, **metrics)
    monkeypatch.setattr(presets, "presets", lambda: {preset.name: preset})
    flags = ["--model", str(model.folder), "--preset", f"{family}/", "--include-path", ".", "--out", str(tmp_path)]
    assert main(["lm", *flags, "--limit", "2", "--set", "gen_length=8", "--log-samples"]) == 0
    printed = capsys.readouterr().out
    assert preset.name in printed and "modified: gen_length: 16 -> 8" in printed and "exact_match,answer" in printed
    (told,) = json.loads((tmp_path / "results.json").read_text())["presets"]
    assert told["changes"] == ["limit: none -> 2", "gen_length: 16 -> 8"]
    (row,) = told["comparison"]["rows"]
    assert row["published"]["value"] == 50.0 and row["told"] == "modified"
    assert told["scores"][0]["task"] == "words_shots" and told["scores"][0]["shots"] == 2
    assert told["counts"]["texts"] == 2 and 1 <= told["counts"]["nfe"] <= 8
    results = json.loads((tmp_path / f"{family}-words" / "results.json").read_text())
    assert results["config"]["dllm_jax"]["preset_hash"] == told["preset_hash"] != preset.hash
    samples = (tmp_path / f"{family}-words" / "samples_words_shots.jsonl").read_text().splitlines()
    (answers,) = (tmp_path / "answers").glob("*.jsonl")
    texts = [json.loads(line)["text"] for line in answers.read_text().splitlines()]
    assert [json.loads(line)["resps"][0][0] for line in samples] == texts
    assert told["preset_hash"] in answers.read_text() and "NFE" in (tmp_path / "table.txt").read_text()


# Draws and order -----------------------------------------------------------------------------------------------------


def test_answers_depend_on_neither_order_nor_batch(llada_tiny):
    texts = [f"{'count ' * (i % 3)}to {i}: " for i in range(5)]
    requests = [request for request in asked(texts) for _ in range(2)]  # two repetitions each
    preset = own(TINY + ",temperature=1.0")
    answers = lambda requests, **options: DllmLM(llada_tiny, preset, progress=False, **options).generate_until(requests)
    first = answers(requests, batch_size=10)
    assert len(set(first)) == 10
    order = np.random.default_rng(0).permutation(5)
    shuffled = [request for i in order for request in requests[2 * i : 2 * i + 2]]
    again = answers(shuffled, batch_size=3)
    assert [again[2 * list(order).index(i) + j] for i in range(5) for j in range(2)] == first
    assert not set(answers(requests, seed=1)) & set(first)


def test_masks_are_those_of_the_document(llada_tiny, monkeypatch):
    """All choices of a document have one seed, whatever else is asked; and what greedy decoding gives is looked for
    only where a document has one continuation."""
    calls = []

    def fake(model, pairs, *, seeds, greedy, **options):
        calls.append((pairs, seeds, greedy, options))
        return [(i, Score(-float(sum(pairs[i][1])), greedy, 1)) for i in reversed(range(len(pairs)))]

    monkeypatch.setattr(harness_model, "score_each", fake)
    preset = likely(samples=32, mc_batch=8, guidance=0.5, estimator="dream", max_prompt=4)
    made = [
        Instance("loglikelihood", {"n": doc}, ("one two ", choice), i, ("made", doc, 1))
        for doc, choices in enumerate([("a", "bc"), ("a", "d"), ("e",)])
        for i, choice in enumerate(choices)
    ]
    found = DllmLM(llada_tiny, preset, progress=False).loglikelihood(made)
    encoded = lambda text: encode_text(llada_tiny.tokenizer, text)
    answers = [encoded(" " + request.args[1]) for request in made]
    assert found == [(-float(sum(ids)), greedy) for ids, greedy in zip(answers, [False] * 4 + [True], strict=True)]
    (pairs, seeds, greedy, options), (one, _, second, _) = calls
    assert pairs == [(encoded(" two")[-4:], ids) for ids in answers[:4]] and not greedy
    assert one == [(encoded(" two")[-4:], answers[4])] and second
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3] and all(0 <= seed < 2**32 for seed in seeds)
    assert {"samples": 32, "mc_batch": 8, "guidance": 0.5, "estimator": "dream"}.items() <= options.items()
    DllmLM(llada_tiny, preset, seed=1, progress=False).loglikelihood(made[::-1])
    assert not set(calls[2][1]) & set(seeds)


# The file of answers -------------------------------------------------------------------------------------------------


@pytest.fixture
def ran(monkeypatch):
    """The requests that were really run."""
    found = []

    def run(self, requests, longest):
        for request in original(self, requests, longest):
            found.append(request)
            yield request

    original = harness_model.Runner.run
    monkeypatch.setattr(harness_model.Runner, "run", run)
    return found


def test_a_killed_run_goes_on(llada_tiny, tmp_path, monkeypatch, ran):
    requests = asked([f"number {i}: " for i in range(6)])
    make = lambda **options: DllmLM(llada_tiny, own(), answers=tmp_path, progress=False, batch_size=2, **options)
    whole = DllmLM(llada_tiny, own(), progress=False, batch_size=2)
    texts = whole.generate_until(requests)
    ran.clear()
    lm, add = make(), harness_model.AnswerFile.add

    def killed(self, *arguments):
        if len(ran) == 4:
            raise KeyboardInterrupt
        add(self, *arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(harness_model.AnswerFile, "add", killed)
        lm.generate_until(requests)
    (path,) = tmp_path.glob("*.jsonl")
    assert len(path.read_text().splitlines()) == 3
    path.write_text(path.read_text() + '{"line": "torn')
    ran.clear()
    again = make()
    assert again.generate_until(requests[::-1]) == texts[::-1] and len(ran) == 3
    told = lambda lm: {name: value for name, value in lm.counts().items() if "second" not in name}
    assert told(again) == told(whole) and again.counts()["tokens_per_second"] > 0
    ran.clear()
    assert make().generate_until(requests) == texts and not ran
    make(seed=1).generate_until(requests[:1])
    DllmLM(llada_tiny, own(until=False), answers=tmp_path, progress=False).generate_until(requests[:1])
    assert len(ran) == 2 and len(list(tmp_path.glob("*.jsonl"))) == 3  # other settings, other files


def test_another_model_never_gets_the_answers(llada_tiny, tmp_path):
    copied = tmp_path / llada_tiny.folder.name
    shutil.copytree(llada_tiny.folder, copied)
    other = dataclasses.replace(llada_tiny, folder=copied)
    assert fingerprint(other) == fingerprint(llada_tiny)
    (file, *_) = sorted(copied.glob("params/**/d/*"))
    data = bytearray(file.read_bytes())
    data[10] ^= 1
    file.write_bytes(data)
    assert fingerprint(other) != fingerprint(llada_tiny)
    with pytest.raises(DllmError, match="without a folder"):
        DllmLM(dataclasses.replace(llada_tiny, folder=None), own(), answers=tmp_path)


def test_the_harness_cache_must_know_the_preset(llada_tiny, tmp_path):
    lm = DllmLM(llada_tiny, own(), progress=False)
    with pytest.raises(DllmError, match=f"put {lm.identity} into its name"):
        CachingLM(lm, str(tmp_path / "cache.db"))
    requests = asked(["one: ", "two: "], do_sample=False)
    cached = CachingLM(lm, str(tmp_path / f"{lm.identity}.db"))
    assert cached.generate_until(requests) == lm.generate_until(requests)
    assert len(cached.dbdict) == 2


# Forms of prompts ----------------------------------------------------------------------------------------------------


class Recorder(DllmLM):
    """Tells what would be encoded."""

    def generate_until(self, requests, disable_tqdm=False):
        forms.check_templated(self.preset, self._templated)
        self.texts = [forms.prompt_text(self.tokenizer, self.preset, request.args[0]) for request in requests]
        return [""] * len(requests)


FIRST = "Q: Ada has 25 eggs. Ada loses 19. Ada shares equally among 2. Ada shares equally among 3. Ada finds 32.\nA:"
FIRST_ANSWER = "25-19=6. 6/2=3. 3/3=1. 1+32=33. #### 33"
SECOND = "Q: Eli has 26 balls. Eli gets 4 more. Eli shares equally among 3. Eli finds 28.\nA:"
SECOND_ANSWER = "26+4=30. 30/3=10. 10+28=38. #### 38"
ASKED = "Q: Leo has 14 apples. Leo makes it 2 times as many. Leo finds 19. Leo loses 17. Leo loses 16.\nA:"
STEPS = "In steps:\n"
SHOTS = f"{FIRST} {FIRST_ANSWER}\n\n{SECOND} {SECOND_ANSWER}\n\n"
HEAD = "<|start_header_id|>{}<|end_header_id|>\n\n"
USER, ASSISTANT, SYSTEM = HEAD.format("user"), HEAD.format("assistant"), HEAD.format("system")
END, IM = "<|eot_id|>", "<|im_start|>{}\n{}<|im_end|>\n"
HELPFUL = IM.format("system", "You are a helpful assistant.")

GOLDEN = {
    ("llada", "words_shots", "raw"): SHOTS + ASKED,
    ("dream", "words_shots", "raw+bos"): f"<|endoftext|>{SHOTS}{ASKED}",
    ("llada", "words", "chat0"): f"{USER}{ASKED}{END}{ASSISTANT}",
    ("dream", "words", "chat0"): f"{HELPFUL}{IM.format('user', ASKED + ' ')}<|im_start|>assistant\n",
    ("llada", "words_shots", "chat1"): f"{USER}{SHOTS}{ASKED}{END}{ASSISTANT}",
    ("llada", "words_shots", "chatN"): (
        f"{USER}{FIRST}{END}{ASSISTANT}{FIRST_ANSWER}{END}{USER}{SECOND}{END}{ASSISTANT}{SECOND_ANSWER}{END}"
        f"{USER}{ASKED}{END}{ASSISTANT}"
    ),
    ("dream", "words_shots", "chatN+bos"): (
        f"<|endoftext|>{HELPFUL}{IM.format('user', FIRST)}{IM.format('assistant', FIRST_ANSWER)}"
        f"{IM.format('user', SECOND)}{IM.format('assistant', SECOND_ANSWER)}{IM.format('user', ASKED)}"
        "<|im_start|>assistant\n"
    ),
    ("llada", "words_prefix", "raw"): f"Compute.{FIRST} {STEPS}{FIRST_ANSWER}\n\n{ASKED} {STEPS}",
    ("llada", "words_prefix", "chatN+system"): (
        f"{SYSTEM}Be brief.\n\nCompute.{END}{USER}{FIRST}{END}{ASSISTANT}{STEPS}{FIRST_ANSWER}{END}"
        f"{USER}{ASKED}{END}{ASSISTANT}{STEPS}"
    ),
    ("dream", "words_prefix", "chat1"): (
        f"{IM.format('system', 'Compute.')}{IM.format('user', f'{FIRST} {STEPS}{FIRST_ANSWER}' + chr(10) * 2 + ASKED)}"
        f"<|im_start|>assistant\n{STEPS}"
    ),
}


@pytest.mark.parametrize("family, task, form", GOLDEN)
def test_prompts_are_these_strings(family, task, form, request):
    model = request.getfixturevalue({"llada": "llada_tiny", "dream": "dream_with_bos"}[family])
    form, _, more = form.partition("+")
    preset = own(form=form, bos=int(more == "bos"), system="Be brief." if more == "system" else None)
    lm = Recorder(model, preset)
    evaluated(lm, task, limit=1, system_instruction=preset.system)
    assert lm.texts == [GOLDEN[family, task, f"{form}+{more}" if more else form]]
    assert model.tokenizer.decode(encode_text(model.tokenizer, lm.texts[0])) == lm.texts[0]


@pytest.mark.parametrize("form, told, advice", [
    ("chat1", {"apply_chat_template": False}, "pass --apply_chat_template"),
    ("raw", {"apply_chat_template": True}, "leave --apply_chat_template out"),
    ("chat1", {"fewshot_as_multiturn": True}, "pass --fewshot_as_multiturn false"),
    ("chatN", {"fewshot_as_multiturn": False}, "pass --fewshot_as_multiturn true"),
])  # fmt: skip
def test_another_form_than_the_presets_is_refused(form, told, advice, llada_tiny):
    preset = dataclasses.replace(own(form=form), shots=2)
    with pytest.raises(DllmError, match=advice):
        evaluated(DllmLM(llada_tiny, preset, progress=False), "words_shots", limit=1, **told)
    system = dataclasses.replace(preset, form="chatN", system="Be brief.")
    with pytest.raises(DllmError, match="pass --system_instruction 'Be brief.'"):
        evaluated(DllmLM(llada_tiny, system, progress=False), "words_shots", limit=1)


def test_a_template_that_cannot_be_continued(llada_tiny):
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "So "}]
    assert chat_text(llada_tiny.tokenizer, turns, continued=True).endswith("assistant<|end_header_id|>\n\nSo ")
    with pytest.raises(DllmError, match="the last message is the user's"):
        chat_text(llada_tiny.tokenizer, turns[:1], continued=True)


# Stop strings, lengths, room ---------------------------------------------------------------------------------------


def test_texts_are_cut_before_the_first_of_each_string(llada_tiny):
    ids = encode_text(llada_tiny.tokenizer, "one\n\ntwo<|eot_id|>three")
    assert forms.cut_answer(llada_tiny.tokenizer, ids, ()) == ("one\n\ntwothree", len(ids))
    assert forms.cut_answer(llada_tiny.tokenizer, ids, ("two", "\n\n", "zzz")) == ("one", 3)
    assert forms.cut_answer(llada_tiny.tokenizer, ids, ("<|eot_id|>",)) == ("one\n\ntwo", 8)
    assert forms.strings_of("x") == ("x",) and forms.strings_of(None) == forms.strings_of([""]) == ()
    with pytest.raises(DllmError, match="until is 3"):
        forms.strings_of(3)


def test_a_stop_string_ends_the_row(words):
    """Early, so that it saves forwards; nine strings are more than a row can look for, and the text is cut at all."""
    sampler, prompt = "topk:gen_length=48,block_length=8", f"Q: {problems()[0]['question']}\nA: "
    lms = [DllmLM(words, own(sampler, until=until), progress=False) for until in (True, True, False)]
    many = [f"never {i}" for i in range(9)]
    requests = [asked([prompt], until=until) for until in (["####"], [*many, ". "], ["####"])]
    early, cut, whole = (lm.generate_until(one)[0] for lm, one in zip(lms, requests, strict=True))
    assert early == whole.partition("####")[0] != whole and cut == whole.partition(". ")[0] != early
    counts = [lm.counts() for lm in lms]
    assert counts[0]["nfe"] < counts[1]["nfe"] == counts[2]["nfe"]
    assert [one["tokens"] for one in counts] == [
        len(encode_text(words.tokenizer, text)) for text in (early, cut, whole)
    ]


def test_the_preset_decides_lengths_and_draws(llada_tiny):
    lm = DllmLM(llada_tiny, own(), progress=False)
    with pytest.warns(UserWarning) as told:
        lm.generate_until(asked(["a", "b"], max_gen_toks=99, temperature=0.7, do_sample=False))
    assert sorted(str(one.message) for one in told) == [
        "max_gen_toks=99 of task made has no effect; the preset says 16",
        "temperature=0.7 of task made has no effect; the preset says 0.0",
    ]


def test_the_task_decides_the_length_where_no_preset_does(llada_tiny):
    lm = DllmLM(llada_tiny, own("topk:k=4"), progress=False)
    lengths = [
        lm._text_request(asked(["a"], **said)[0], 0).gen_length for said in ({"max_gen_toks": 9}, {"max_tokens": 5}, {})
    ]
    assert lengths == [9, 5, 256]
    lm.generate_until(asked(["a"], max_gen_toks=5))
    (key,) = lm._used
    assert len(lm.answers[key]["canvas_ids"]) == 5
    with pytest.raises(DllmError, match="max_gen_toks is 'many'"):
        lm.generate_until(asked(["a"], max_gen_toks="many"))


def test_long_prompts_lose_their_beginning(llada_tiny):
    lm = DllmLM(llada_tiny, own(max_prompt=6), progress=False)
    with pytest.warns(UserWarning, match="more than 6 tokens, such as one of 30"):
        one = lm._text_request(asked(["x" * 24 + "123456"])[0], 0)
    assert one.ids == encode_text(llada_tiny.tokenizer, "123456")


@pytest.mark.parametrize("name, empty", [("dream_tiny", "eos_id"), ("words", "bos_id")])
def test_an_empty_prompt_is_a_start_token(name, empty, request):
    model = request.getfixturevalue(name)
    lm = DllmLM(model, own(), progress=False)
    assert lm._text_request(asked([""])[0], 0).ids == [getattr(model.config, empty)]


# What people say -----------------------------------------------------------------------------------------------------


def test_from_model_args(llada_tiny):
    text = f"pretrained={llada_tiny.folder},sampler=topk:k=2,form=chat1,gen_length=8,seed=3,mesh=data=2,dtype=float32"
    lm = DllmLM.create_from_arg_string(text, {"batch_size": 4, "device": "cuda:0", "max_batch_size": None})
    assert lm.preset.sampler == "topk:k=2,gen_length=8" and lm.preset.form == "chat1" and lm.seed == 3
    assert lm.model.layout.mesh.shape == {"data": 2} and lm.world_size == 1 and lm.rank == 0
    lm = DllmLM.create_from_arg_obj({"pretrained": str(llada_tiny.folder), "sampler": "topk"}, {"batch_size": "auto"})
    assert lm.preset.name == "own" and lm.tokenizer_name.startswith("llada-tiny-")


def test_a_mesh_shares_the_prompts(llada_tiny):
    """Three prompts on two devices have the answers of one."""
    said = {"pretrained": str(llada_tiny.folder), "sampler": TINY, "batch_size": 4}
    lms = [DllmLM.create_from_arg_obj(said | more) for more in ({}, {"mesh": "data=2"})]
    one, two = (lm.generate_until(asked(["a: ", "b: ", "c: "])) for lm in lms)
    assert one == two and len(set(one)) == 3


@pytest.mark.parametrize("said, sentence", [
    ({}, "pretrained="),
    ({"pretrained": "x", "sampler": "topk", "preset": "y"}, "not both"),
    ({"pretrained": "x", "temperature": 1}, "temperature"),
    ({"pretrained": "x", "preset": "no/such"}, "'no/such'"),
    ({"pretrained": "x", "sampler": "nope"}, "'nope'"),
    ({"pretrained": "x", "sampler": "topk", "batch_size": "few"}, "batch_size is 'few'"),
    ({"pretrained": "x", "sampler": "topk", "mesh": "row=2"}, "'row'"),
])  # fmt: skip
def test_bad_model_args(said, sentence):
    with pytest.raises(DllmError, match=sentence):
        DllmLM.create_from_arg_obj(said)


def test_what_cannot_be_asked(llada_tiny):
    lm = DllmLM(llada_tiny, likely(), progress=False)
    with pytest.raises(DllmError, match="preset likely .*task made"):
        lm.generate_until(asked(["a"]))
    with pytest.raises(NotImplementedError, match="no estimator"):
        lm.loglikelihood_rolling(asked(["a"]))
    with pytest.raises(DllmError, match="continuation ''"):
        lm.loglikelihood([Instance("loglikelihood", {}, ("a", ""), 0, ("made", 0, 1))])
    with pytest.raises(DllmError, match="exceed the 512 tokens"):
        DllmLM(llada_tiny, own("topk:k=4,gen_length=600"), progress=False).generate_until(asked(["a"]))
    with pytest.raises(DllmError, match="start token"):
        llada = dataclasses.replace(own(), bos=1)
        DllmLM(llada_tiny, llada, progress=False).generate_until(asked(["a"]))


@pytest.mark.parametrize("flags, sentence", [
    ([], "--preset"),
    (["--preset", "no/such"], "'no/such'"),
    (["--sampler", "topk"], "--preset"),
    (["--sampler", "topk", "--tasks", "words", "--preset", "x"], "--sampler has no effect"),
    (["--sampler", "topk", "--tasks", "words", "--set", "oops"], "'oops'"),
])  # fmt: skip
def test_bad_commands(flags, sentence, capsys):
    assert main(["lm", "--model", "absent", *flags]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("module, task", [("evals.harness", "words"), ("lm_eval", "words_registered.yaml")])
def test_the_harness_own_command(module, task, llada_tiny, tmp_path):
    """Ours registers the model; the harness's own has it from a task's file that names it."""
    said = json.dumps({"pretrained": str(llada_tiny.folder), "sampler": TINY})
    flags = ["--model", "dllm_jax", "--model_args", said, "--tasks", task, "--include_path", ".", "--limit", "2"]
    where = {"PYTHONPATH": str(TASKS.parents[1]), "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-m", module, *flags]
    found = subprocess.run(command, env=os.environ | where, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert "exact_match" in found.stdout
