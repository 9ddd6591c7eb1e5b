"""`python -m samplers serve`: what clients of OpenAI's API see, and that no fault of one reaches another."""

import asyncio
import concurrent.futures
import contextlib
import copy
import dataclasses
import json
import logging
import os
import queue
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import httpx
import jax
import openai
import pytest
import test_calls
from browser import CHROMIUM, Browser
from conftest import wait_until
from pydantic import ValidationError

import dllm_jax
from convert import embedded
from dllm_jax import DllmError
from dllm_jax.families import FAMILIES
from dllm_jax.text.tokenizer import encode_chat, encode_text, load_tokenizer, without_special_tokens
from samplers import Engine, decide, generate, infill, make_sampler, sample_jit
from samplers.cli import sample as cli
from samplers.generation import answer
from samplers.serving import cli as cli_of_server
from samplers.serving import engine_thread, middleware, page, scheduler, server
from samplers.serving.cli import LogRate
from samplers.serving.connections import SPARE_FILES, Connections, connection_limit
from samplers.serving.errors import Fault
from samplers.serving.fair_queue import FairQueue
from samplers.serving.scheduler import Limits
from samplers.serving.schemas import ChatBody, TextBody
from samplers.text import prompts
from samplers.text.prompts import encode_prompt, pad_prompts
from samplers.tokens.noise import row_keys

pytestmark = pytest.mark.processes

LENGTH, BLOCK = 16, 8
SHAPE = {"gen_length": LENGTH, "block_length": BLOCK, "cache": "none"}
PROMPT = "Q: Tom has 12 pears. Tom buys 23.\nA: "
SECRET = "swordfish"
NONE = Limits(deadline=None)
SMALL = ["--gen-length", "8", "--block-length", "8", "--cache", "none"]


@pytest.fixture(scope="module")
def model(llada_tiny):
    """One layer of random weights, which write whatever there is in a byte-level vocabulary, broken characters too."""
    source = embedded.source("word-problems")
    ids = {"vocab_size": 517, "eos_id": 0, "pad_id": 0, "mask_id": 1, "end_ids": (0, 2), "bos_id": 3}
    config = llada_tiny.config.replace(num_layers=1, max_length=256, **ids)
    found = dllm_jax.random_model(config, key=1)
    tokenizer = load_tokenizer(source, config)
    tokenizer.chat_template = FAMILIES["llada"].chat_template  # the embedded model has none
    return dataclasses.replace(found, tokenizer=tokenizer, name="tiny")


@pytest.fixture(scope="module")
def start(model):
    """Starts servers: a context of one in a thread of its own."""

    @contextlib.contextmanager
    def call(*, of=model, sampler="threshold", slots=4, step=None, limits=NONE, room=None, **options):
        given = {"slots": slots, "prompt_length": 64, "draws": True, **SHAPE, **(room or {})}
        engine = Engine(of, sampler, **given)
        if step is not None:
            engine.compile()
            engine.step = step(engine, engine.step)
        at, started = server.bind_socket("127.0.0.1", 0), queue.Queue()
        on_start = lambda made: started.put((made, asyncio.get_running_loop()))
        work = server.serve(engine, at, limits, on_start=on_start, **options)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            ended = pool.submit(asyncio.run, work)
            url = server.url_of(at)
            made, loop = started.get(timeout=120)
            found = SimpleNamespace(url=url, engine=engine, server=made, loop=loop, ended=ended)
            try:
                yield found
            finally:
                if not ended.done():
                    found.server.handle_exit(signal.SIGINT, None)
            if ended.exception(timeout=60) is not None and not getattr(found, "may_fail", False):
                raise ended.exception()

    return call


@pytest.fixture(scope="module")
def served(start):
    """A server for all tests that leave it as it was."""
    with start(room={"buckets": True}) as found:
        found.client = _client(found.url)
        yield found


@pytest.fixture(scope="module")
def alone(model):
    """The answer to a prompt alone, by a program that knows nothing of engines; that is `generate`'s, see below."""

    def call(prompt, seed, stop=(), **options):
        sampler = make_sampler(model, "threshold", stop=stop, **{**SHAPE, **options})
        ids, key = encode_prompt(model, prompt), row_keys(jax.random.key(seed), 1)
        result = sample_jit(sampler, model.denoiser, *pad_prompts([ids], 64), key=key)
        return answer(model, ids, jax.device_get(result), 0, stop)

    return call


def test_what_is_compared_with_is_the_answer_of_generate(model, alone):
    for seed in (0, 1):
        (wanted,) = generate(model, [PROMPT], sampler="threshold", seed=seed, temperature=0.7, stop=["a"], **SHAPE)
        assert alone(PROMPT, seed, temperature=0.7, stop=["a"]) == wanted


def _status(url):
    try:
        return httpx.get(url + "/health", timeout=5).status_code
    except httpx.TransportError:
        return None


def _metric(url, name):
    found = re.search(rf"^{re.escape(name)} (\S+)$", httpx.get(url + "/metrics").text, re.MULTILINE)
    return 0.0 if found is None else float(found[1])


def _client(url, key="none"):
    return openai.OpenAI(base_url=url + "/v1", api_key=key, max_retries=0)


def _user(text):
    return [{"role": "user", "content": text}]


def _ask(url, prompt=PROMPT, **options):
    return httpx.post(url + "/v1/completions", json={"prompt": prompt, **options}, timeout=60)


# Answers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numbers", [{}, {"threshold": 0.004}, {"temperature": 0.7, "top_p": 0.9, "top_k": 50}])
def test_an_answer_is_that_of_generate(served, alone, numbers):
    own = {name: value for name, value in numbers.items() if name in ("temperature", "top_p")}
    extra = {name: value for name, value in numbers.items() if name not in own}
    for seed in (0, 7):
        wanted = alone(PROMPT, seed, **numbers)
        found = served.client.completions.create(model="tiny", prompt=PROMPT, seed=seed, extra_body=extra, **own)
        assert found.choices[0].text == wanted.text
        assert found.usage.completion_tokens == len(wanted.tokens) and found.usage.prompt_tokens == wanted.prompt_tokens
        assert (found.seed, found.usage.forwards) == (seed, wanted.nfe)
        assert found.choices[0].finish_reason == ("length" if len(wanted.tokens) == LENGTH else "stop")


def test_a_chat_is_that_of_generate_streamed_and_not(served, alone):
    wanted = alone(_user("How many?"), 3)
    options = {"model": "tiny", "messages": _user("How many?"), "seed": 3}
    whole = served.client.chat.completions.create(**options)
    assert whole.choices[0].message.content == wanted.text and whole.choices[0].message.role == "assistant"
    parts = list(served.client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(part.choices[0].delta.content or "" for part in parts[:-1]) == wanted.text
    assert parts[0].choices[0].delta.role == "assistant" and len({part.id for part in parts}) == 1
    assert parts[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert parts[-1].choices == [] and parts[-1].usage.completion_tokens == len(wanted.tokens)
    assert parts[-1].system_fingerprint == whole.system_fingerprint
    given = _user([{"type": "text", "text": "How "}, {"type": "text", "text": "many?"}])
    assert served.client.chat.completions.create(**{**options, "messages": given}).choices == whole.choices


def _message(url, **body):
    body = {"model": "tiny", "max_tokens": LENGTH, "messages": _user("How many?"), "seed": 3, **body}
    return httpx.post(url + "/v1/messages", json=body, timeout=60)


def test_a_message_has_anthropics_form(served, alone):
    wanted = alone([{"role": "system", "content": "Be brief."}, *_user("How many?")], 3)
    parts = [
        {"type": "text", "text": "Be "},
        {"type": "text", "text": "brief.", "cache_control": {"type": "ephemeral"}},
    ]
    usage = {"input_tokens": wanted.prompt_tokens, "output_tokens": len(wanted.tokens)}
    reason = "max_tokens" if len(wanted.tokens) == LENGTH else "end_turn"
    ending = {"stop_reason": reason, "stop_sequence": None}
    for system in ("Be brief.", parts):
        found = _message(served.url, system=system).json()
        assert found.pop("id").startswith("msg_")
        head = {"type": "message", "role": "assistant", "model": "tiny"}
        assert found == {**head, "content": [{"type": "text", "text": wanted.text}], **ending, "usage": usage}
    lines = _message(served.url, system=parts, stream=True).text.split("\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    assert names == [event["type"] for event in events]
    begin, block, *deltas, stopped, last, end = events
    message = begin["message"]
    assert (begin["type"], message["content"], message["usage"]) == ("message_start", [], {**usage, "output_tokens": 0})
    assert block == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    assert {event["type"] for event in deltas} == {"content_block_delta"} and len(deltas) > 1
    assert "".join(event["delta"]["text"] for event in deltas) == wanted.text
    assert stopped == {"type": "content_block_stop", "index": 0} and end == {"type": "message_stop"}
    assert last == {"type": "message_delta", "delta": ending, "usage": usage}


def test_a_message_ends_at_a_stop_sequence(served, alone):
    text = alone(PROMPT, 1).text
    stop = re.search("[ -~]{2}", text)[0]
    found = served.client.completions.create(model="tiny", prompt=PROMPT, seed=1, stop=["\u00e9", stop]).choices[0]
    assert (found.text, found.finish_reason, found.stop_reason) == (text[: text.index(stop)], "stop", stop)
    text = alone(_user("How many?"), 3).text
    stop = re.search("[ -~]{2}", text)[0]
    found = _message(served.url, stop_sequences=[stop, "\u00e9"]).json()
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", stop)
    assert found["content"][0]["text"] == text[: text.index(stop)]
    short = _message(served.url, max_tokens=2, temperature=0.5, top_p=0.9, top_k=5, metadata={"user_id": "a"}).json()
    assert (short["stop_reason"], short["usage"]["output_tokens"]) == ("max_tokens", 2)


def test_text_is_streamed_while_it_is_written(served, alone):
    parts = served.client.completions.create(model="tiny", prompt=PROMPT, seed=5, stream=True)
    texts = [part.choices[0].text for part in parts]
    assert "".join(texts) == alone(PROMPT, 5).text
    assert sum(map(bool, texts)) > 2  # not all at the end


def test_several_prompts_and_copies_have_the_seeds_that_follow(served, alone):
    prompts = [PROMPT, "Q: "]
    found = served.client.completions.create(model="tiny", prompt=prompts, n=2, seed=4, temperature=1.0)
    wanted = [alone(prompt, 4 + i, temperature=1.0) for i, prompt in enumerate((PROMPT, PROMPT, "Q: ", "Q: "))]
    assert [choice.text for choice in found.choices] == [answer.text for answer in wanted]
    assert found.usage.completion_tokens == sum(len(answer.tokens) for answer in wanted)
    assert found.usage.prompt_tokens == wanted[0].prompt_tokens + wanted[2].prompt_tokens
    texts = {0: "", 1: "", 2: "", 3: ""}
    for part in served.client.completions.create(
        model="tiny", prompt=prompts, n=2, seed=4, temperature=1.0, stream=True
    ):
        texts[part.choices[0].index] += part.choices[0].text
    assert list(texts.values()) == [answer.text for answer in wanted]


def test_token_ids_are_a_prompt(served, model, alone):
    ids = model.tokenizer.encode(PROMPT, add_special_tokens=False)
    for prompt in (ids, [ids]):
        found = served.client.completions.create(model="tiny", prompt=prompt, seed=2)
        assert found.choices[0].text == alone(PROMPT, 2).text


TYPED = "<|mdm_mask|> or <|eot_id|>"


def test_special_tokens_that_clients_write_are_text(served, model, alone):
    text = dataclasses.replace(model, tokenizer=without_special_tokens(model.tokenizer))
    post = lambda path, **body: httpx.post(f"{served.url}/v1/{path}", json={"seed": 2, **body}, timeout=120).json()
    ids = encode_prompt(text, TYPED)
    assert set(ids).isdisjoint(range(6)) and model.tokenizer.decode(ids) == TYPED
    found = post("completions", prompt=TYPED)
    assert (found["choices"][0]["text"], found["usage"]["prompt_tokens"]) == (alone(ids, 2).text, len(ids))
    asked = _user(TYPED)
    ids = encode_chat(text.tokenizer, asked)
    assert [i for i in ids if i < 6] == [i for i in encode_chat(model.tokenizer, _user("a")) if i < 6]
    found = post("chat/completions", messages=asked)
    assert found["choices"][0]["message"]["content"] == alone(ids, 2).text
    own = infill(text, f"{TYPED}<gap:2><|eot_id|>", prompt=TYPED, sampler="threshold", seed=2, block_length=BLOCK)
    found = post("infill", template=f"{TYPED}<gap:2><|eot_id|>", prompt=TYPED)
    assert (found["text"], found["usage"]["prompt_tokens"]) == (own.text, own.prompt_tokens)
    own = decide(text, TYPED, CHOICE, template="<|eot_id|>{answer} {urgency}")
    found = post("decide", prompt=TYPED, fields=CHOICE, template="<|eot_id|>{answer} {urgency}")
    assert (found["values"], found["usage"]["prompt_tokens"]) == (own.values, own.prompt_tokens)
    found = post("completions", prompt=[4, 5, 60])
    assert found["choices"][0]["text"] == alone([4, 5, 60], 2).text, "ids stay ids"


def test_special_tokens_become_ids_where_the_operator_says_so(start, alone):
    with start(slots=1, limits=dataclasses.replace(NONE, special_tokens=True)) as found:
        answer = _ask(found.url, "a<|eot_id|>", seed=2).json()
        assert (answer["choices"][0]["text"], answer["usage"]["prompt_tokens"]) == (alone("a<|eot_id|>", 2).text, 2)
        assert "mask token" in _ask(found.url, TYPED).json()["error"]["message"]


def test_stop_strings_and_max_tokens_end_an_answer(served, alone):
    text = alone(PROMPT, 1).text
    stop = text[3:5]
    wanted = alone(PROMPT, 1, stop=[stop])
    ask = lambda **options: served.client.completions.create(model="tiny", prompt=PROMPT, seed=1, **options)
    found = ask(stop=stop)
    assert found.choices[0].text == wanted.text == text[: text.index(stop)]
    assert found.choices[0].finish_reason == "stop"
    assert "".join(part.choices[0].text for part in ask(stop=[stop, "\u00e9"], stream=True)) == wanted.text
    short = ask(max_tokens=3)
    assert short.choices[0].text == alone(PROMPT, 1, gen_length=3).text
    assert (short.choices[0].finish_reason, short.usage.completion_tokens) == ("length", 3)
    chat = served.client.chat.completions.create(model="tiny", messages=_user("a"), max_completion_tokens=2)
    assert chat.usage.completion_tokens <= 2


def test_why_an_answer_ended_needs_its_text_once(served, monkeypatch):
    calls, real = [], scheduler.text_of
    monkeypatch.setattr(scheduler, "text_of", lambda *about: calls.append(about) or real(*about))
    assert _ask(served.url, stop=["é"]).status_code == 200 and len(calls) == 1
    assert _ask(served.url).status_code == 200 and len(calls) == 1, "without stop strings nothing was cut off"


def test_more_tokens_than_there_are_mean_all_of_them(served, start, alone):
    wanted = alone(PROMPT, 1)
    ask = lambda **options: served.client.completions.create(model="tiny", prompt=PROMPT, seed=1, **options)
    found = ask(max_tokens=10**6)
    assert (found.choices[0].text, found.usage.max_tokens) == (wanted.text, LENGTH)
    assert "max_tokens" not in ask(max_tokens=LENGTH).usage.to_dict()
    *_, last = ask(max_tokens=10**6, stream=True, stream_options={"include_usage": True})
    assert last.usage.max_tokens == LENGTH
    with start(limits=dataclasses.replace(NONE, clamp=False)) as strict:
        refused = _ask(strict.url, max_tokens=LENGTH + 1)
        assert refused.status_code == 400 and f"exceeds {LENGTH}" in refused.text


def test_an_echo_is_the_prompt_before_the_answer(served, model, alone):
    ids = model.tokenizer.encode(PROMPT, add_special_tokens=False)
    for prompt in (PROMPT, ids):
        ask = lambda prompt=prompt, **own: served.client.completions.create(
            model="tiny", prompt=prompt, seed=1, n=2, echo=True, **own
        )
        wanted = [PROMPT + alone(PROMPT, seed).text for seed in (1, 2)]
        assert [choice.text for choice in ask().choices] == wanted
        texts = ["", ""]
        for part in ask(stream=True):
            texts[part.choices[0].index] += part.choices[0].text
        assert texts == wanted


@pytest.mark.parametrize("stream", [False, True])
def test_a_suffix_makes_a_gap_before_it(served, model, stream):
    """The suffix is text, whatever it looks like."""
    suffix = "\\<gap:3>"
    template = "<gap:4>\\\\\\<gap:3>"
    wanted = [infill(model, template, prompt=PROMPT, sampler="threshold", seed=s, block_length=8) for s in (5, 6)]
    options = {"suffix": suffix, "max_tokens": 4, "seed": 5, "n": 2, "stream": stream}
    options |= {"stream_options": {"include_usage": True}} if stream else {}
    found = served.client.completions.create(model="tiny", prompt=PROMPT, **options)
    parts, texts = list(found) if stream else [found], ["", ""]
    assert parts[-1].usage.completion_tokens == sum(len(one.tokens) for one in wanted)
    for choice in [choice for part in parts for choice in part.choices]:
        texts[choice.index] += choice.text
        assert choice.finish_reason in ((None, "length") if stream else ("length",))
    assert texts == [one.gaps[0] for one in wanted] and wanted[0].text.endswith(suffix)


def test_a_logit_bias_chooses_tokens(served, model, alone):
    (seven,) = model.tokenizer.encode("7", add_special_tokens=False)
    options = {"model": "tiny", "max_tokens": 4, "seed": 1, "logit_bias": {str(seven): 100, "0": -100}}
    found = served.client.completions.create(prompt=PROMPT, **options)
    assert found.choices[0].text == "7777"
    assert served.client.completions.create(prompt=PROMPT, suffix="!", **options).choices[0].text == "7777"
    whole = served.client.chat.completions.create(messages=_user("a"), **options)
    assert whole.choices[0].message.content == "7777"
    body = {"template": "a<gap:2>b", "logit_bias": {str(seven): 100}}
    assert httpx.post(served.url + "/v1/infill", json=body, timeout=120).json()["gaps"] == ["77"]
    assert _ask(served.url, seed=1, logit_bias={}).json()["choices"][0]["text"] == alone(PROMPT, 1).text


def test_without_a_seed_one_is_drawn_and_reported(served, alone):
    ask = lambda: served.client.completions.create(model="tiny", prompt=PROMPT, temperature=1.0)
    first, second = ask(), ask()
    assert first.seed != second.seed
    assert first.choices[0].text == alone(PROMPT, first.seed, temperature=1.0).text


def test_logprobs_are_those_of_the_written_tokens(served, alone):
    wanted = alone(_user("a"), 1)
    options = {"model": "tiny", "messages": _user("a"), "seed": 1, "logprobs": True}
    found = served.client.chat.completions.create(**options).choices[0].logprobs.content
    assert [token.logprob for token in found] == pytest.approx(wanted.logprobs, abs=1e-4)
    assert b"".join(bytes(token.bytes) for token in found).decode("utf-8", "replace") == wanted.text
    parts = list(served.client.chat.completions.create(**options, stream=True))
    streamed = [token for part in parts if part.choices[0].logprobs for token in part.choices[0].logprobs.content]
    assert streamed == found
    text = served.client.completions.create(model="tiny", prompt=PROMPT, seed=1, logprobs=0).choices[0].logprobs
    assert text.token_logprobs == pytest.approx(alone(PROMPT, 1).logprobs, abs=1e-4)
    assert text.text_offset[0] == 0 and text.text_offset == sorted(text.text_offset)


def test_the_most_probable_tokens_come_with_each_of_an_answer(start, alone):
    with start(slots=2, room={"top_logprobs": 20}) as found:
        client, options = _client(found.url), {"model": "tiny", "seed": 1}
        wanted = alone(_user("a"), 1)
        chat = {**options, "messages": _user("a"), "logprobs": True, "top_logprobs": 20}
        content = client.chat.completions.create(**chat).choices[0].logprobs.content
        assert [token.logprob for token in content] == pytest.approx(wanted.logprobs, abs=1e-4)
        for token in content:
            first, *others = token.top_logprobs
            assert len(others) == 19 and (first.token, first.bytes) == (token.token, token.bytes)
            assert token.logprob == pytest.approx(first.logprob, abs=1e-4) and first.logprob >= others[0].logprob
        parts = client.chat.completions.create(**chat, stream=True)
        streamed = [token for part in parts if part.choices[0].logprobs for token in part.choices[0].logprobs.content]
        assert streamed == content
        drawn = client.completions.create(**options, prompt=PROMPT, logprobs=2, temperature=1.0).choices[0].logprobs
        for token, logprob, top in zip(drawn.tokens, drawn.token_logprobs, drawn.top_logprobs, strict=True):
            assert top[token] == pytest.approx(logprob, abs=1e-4), "the drawn one besides"
            assert max(top.values()) >= logprob and 1 <= len(top) <= 3  # two may have one text
        plain = client.completions.create(**options, prompt=PROMPT)
        assert plain.choices[0].text == alone(PROMPT, 1).text and plain.choices[0].logprobs is None


@pytest.mark.parametrize(
    "prompt", ["caf\u00e9 \u6f22\u5b57 \U0001f600", "a\u0301\u200d\ufeff", "\x00\r\n", "\u202e" * 9]
)
def test_any_character_goes_in_and_out(served, alone, prompt):
    found = served.client.completions.create(model="tiny", prompt=prompt, seed=9, stop=["\U0001f600"])
    assert found.choices[0].text == alone(prompt, 9, stop=["\U0001f600"]).text


def test_the_canvas_is_sent_forward_by_forward(served, model, alone):
    wanted = alone(PROMPT, 6)
    with httpx.stream("POST", served.url + "/v1/canvas", json={"prompt": PROMPT, "seed": 6}, timeout=60) as answer:
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert events.pop() == "[DONE]"
    head, *frames, tail = map(json.loads, events)
    assert (head["length"], head["block"], head["seed"]) == (LENGTH, BLOCK, 6)
    cells, number = [None] * LENGTH, 0
    for frame in frames:
        assert frame["forward"] > number and frame["busy"] <= head["slots"]
        number = frame["forward"]
        for at, text, _ in frame["cells"]:
            cells[at] = text
        assert all(cells[at] is not None for at in frame["written"])
    assert number == wanted.nfe and None not in cells
    assert {at for frame in frames for at in frame["written"]} == set(range(LENGTH))
    assert tail["text"] == wanted.text and tail["usage"]["forwards"] == wanted.nfe
    strings = [model.tokenizer.decode([token], skip_special_tokens=True) for token in wanted.tokens]
    assert [a for a, b in zip(cells, strings, strict=False) if "\ufffd" not in b] == [
        b for b in strings if "\ufffd" not in b
    ]


def test_a_slow_reader_misses_nothing_of_the_canvas(start, alone):
    """The event loop stands still for three turns of the engine."""
    wanted, written, frames, go = alone(PROMPT, 6), [], 0, threading.Event()

    def stand_still(engine):
        go.set()
        wait_until(lambda: engine.stats.steps >= 3)

    with (
        start(step=_gated(go)) as found,
        httpx.stream("POST", found.url + "/v1/canvas", json={"prompt": PROMPT, "seed": 6}, timeout=60) as answer,
    ):
        for line in filter(None, answer.iter_lines()):
            event = json.loads(line.removeprefix("data: ")) if "{" in line else {}
            if "length" in event:
                found.loop.call_soon_threadsafe(stand_still, found.engine)
            frames += "forward" in event
            written += event.get("written", [])
    assert frames <= wanted.nfe - 2 and sorted(written) == list(range(LENGTH))


# What is refused ------------------------------------------------------------------------------------------------------

BAD = [
    (b"", 400, "object"),
    (b"{", 400, "JSON"),
    (b"\xff{}", 400, ""),
    (b"[" * 100_000, 400, "read"),
    (b"[]", 400, "object"),
    (b"null", 400, "object"),
    ({}, 422, "prompt"),
    ({"prompt": 1}, 422, "prompt"),
    ({"prompt": {"a": 1}}, 422, "prompt"),
    ({"prompt": ""}, 400, "empty"),
    ({"prompt": []}, 400, "empty"),
    ({"prompt": [[]]}, 400, "empty"),
    ({"prompt": [10**9]}, 400, "vocabulary"),
    ({"prompt": [-1]}, 400, "vocabulary"),
    ({"prompt": ["a"] * 999}, 400, "999"),
    ({"prompt": "a " * 500}, 400, "takes 64"),
    ({"prompt": [5] * 500}, 400, "takes 64"),
    ({"prompt": "a\ud800"}, 422, "prompt"),
    ({"prompt": ["a", "\ud800"]}, 422, "prompt"),
    ({"prompt": "a", "stop": "\ud800"}, 422, "stop"),
    ({"prompt": "a", "\ud800": "b"}, 400, ""),
    ({"prompt": [True]}, 422, "prompt"),
    ({"prompt": [[1], [True]]}, 422, "prompt"),
    ({"prompt": [1, "a"]}, 422, "prompt"),
    ({"prompt": "a", "max_completion_tokens": 3}, 400, "max_completion_tokens"),
    ({"prompt": "a", "user": [0] * 5000}, 400, "4096"),
    ({"prompt": "a", "user": [[0] * 3000, {str(i): i for i in range(3000)}]}, 400, "4096"),
    ({"prompt": [1]}, 400, "mask"),
    ({"prompt": "a", "max_tokens": "3"}, 422, "max_tokens"),
    ({"prompt": "a", "max_tokens": 0}, 422, "max_tokens"),
    ({"prompt": "a", "temperature": -1}, 422, "temperature"),
    ({"prompt": "a", "temperature": float("nan")}, 422, "temperature"),
    ({"prompt": "a", "top_p": 0}, 422, "top_p"),
    ({"prompt": "a", "seed": 2**32}, 422, "seed"),
    ({"prompt": "a", "seed": 1.5}, 422, "seed"),
    ({"prompt": "a", "n": 0}, 422, "n:"),
    ({"prompt": "a", "n": 128}, 400, "128"),
    ({"prompt": "a", "stream": "yes"}, 422, "stream"),
    ({"prompt": "a", "stop": ""}, 400, "empty"),
    ({"prompt": "a", "stop": ["a"] * 3 + list("bcdefghijk")}, 400, "patterns"),
    ({"prompt": "a", "stop": [1]}, 422, "stop"),
    ({"prompt": "a", "logprobs": 3}, 400, "--top-logprobs"),
    ({"prompt": "a", "logprobs": 6}, 422, "5"),
    ({"prompt": "a", "logprobs": 2, "suffix": "b"}, 400, "'logprobs' has no effect"),
    ({"prompt": "a", "suffix": "b", "stop": "c"}, 400, "'stop' has no effect on a text before a suffix"),
    ({"prompt": "a", "suffix": "b" * 5000}, 400, f"room for {LENGTH}"),
    ({"prompt": "a", "echo": True, "logprobs": 0}, 400, "echo"),
    ({"prompt": "a", "presence_penalty": 0.5}, 400, "presence_penalty"),
    ({"prompt": "a", "logit_bias": {"a": 1}}, 422, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"5": 101}}, 422, "100"),
    ({"prompt": "a", "logit_bias": {str(i): 1 for i in range(301)}}, 422, "300"),
    ({"prompt": "a", "logit_bias": {"99999": 1}}, 400, "vocabulary"),
    ({"prompt": "a", "logit_bias": {"1": 1}}, 400, "mask"),
    ({"prompt": "a", "model": "other"}, 404, "other"),
    ({"prompt": "a", "treshold": 0.5}, 400, "threshold, top_k, top_p"),
    ({"prompt": "a", "threshold": "0.5"}, 400, "threshold"),
    ({"prompt": "a", "threshold": True}, 400, "threshold"),
    ({"prompt": "a", "threshold": 10**400}, 400, "range"),
    ({"prompt": "a", "threshold": -5}, 400, "threshold"),
    ({"prompt": "a", "block_length": 4}, 400, "block_length"),
    ({"prompt": "a", "key": 4}, 400, "key"),
    ({"prompt": "a", "given": 4}, 400, "given"),
    ({"prompt": "a", "verifier": "/etc/passwd"}, 400, "verifier"),
]


@pytest.mark.parametrize("number", range(len(BAD)))
def test_a_bad_body_gets_an_error_of_openais_format(served, number):
    body, status, words = BAD[number]
    content = body if isinstance(body, bytes) else json.dumps(body)
    answer = httpx.post(
        served.url + "/v1/completions", content=content, headers={"Content-Type": "application/json"}, timeout=60
    )
    error = answer.json()["error"]
    assert (answer.status_code, words in error["message"]) == (status, True), (answer.status_code, error)
    assert set(error) == {"message", "type", "param", "code"} and "\n" not in error["message"]
    assert served.server.service.in_flight == 0 and not served.ended.done()


BAD_MESSAGES = [
    ({"max_tokens": None}, 422, "invalid_request_error", "max_tokens"),
    ({"messages": []}, 400, "invalid_request_error", "empty"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 422, "invalid_request_error", "'text'"),
    ({"messages": [*_user("a"), {"role": "assistant", "content": "b"}]}, 400, "invalid_request_error", "assistant's"),
    ({"tools": [{"name": "a"}]}, 400, "invalid_request_error", "tools is not supported"),
    ({"thinking": {"type": "enabled"}}, 400, "invalid_request_error", "thinking"),
    ({"n": 2}, 400, "invalid_request_error", "'n'"),
    ({"stop": "a"}, 400, "invalid_request_error", "'stop'"),
    ({"model": "other"}, 404, "not_found_error", "other"),
    ({"stream": True, "temperature": 9}, 422, "invalid_request_error", "temperature"),
]


@pytest.mark.parametrize("number", range(len(BAD_MESSAGES)))
def test_a_bad_message_gets_an_error_of_anthropics_format(served, number):
    body, status, kind, words = BAD_MESSAGES[number]
    answer = _message(served.url, **body)
    error = answer.json()
    assert (answer.status_code, error["type"], set(error["error"])) == (status, "error", {"type", "message"}), error
    assert error["error"]["type"] == kind and words in error["error"]["message"], error
    assert served.server.service.in_flight == 0


GAPS = ["Tom has<gap:3>.", "<gap:2>12 + 12 = <edit>24</edit>!", "Q: <gap:4>\nA:<gap:2>"]


def test_an_infilling_is_the_librarys(served, model):
    """Of several clients at once, beside answers; alone and as the form of an answer, with numbers."""
    bodies = [{"template": text, "seed": 2, "threshold": 0.004 + number / 4} for number, text in enumerate(GAPS)]
    bodies += [{"template": GAPS[0], "prompt": PROMPT, "temperature": 0.7, "seed": 4}]
    bodies += [{"template": GAPS[0], "messages": _user("Why?"), "seed": 5}]
    call = lambda body: httpx.post(served.url + "/v1/infill", json=body, timeout=120)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        others = [pool.submit(served.client.completions.create, model="tiny", prompt=PROMPT) for _ in range(2)]
        found = list(pool.map(call, bodies))
        assert all(other.result().choices[0].text for other in others)
    shape = {name: value for name, value in SHAPE.items() if name != "gen_length"}
    for body, response in zip(bodies, found, strict=True):
        assert response.status_code == 200, response.text
        mine, numbers = response.json(), {name: body[name] for name in ("threshold", "temperature") if name in body}
        asked = {"prompt": "Why?", "chat": True} if "messages" in body else {"prompt": body.get("prompt")}
        own = infill(model, body["template"], sampler="threshold", seed=body["seed"], **asked, **numbers, **shape)
        assert (mine["text"], mine["gaps"], mine["seed"]) == (own.text, own.gaps, body["seed"])
        assert mine["usage"]["forwards"] == own.nfe and mine["usage"]["prompt_tokens"] == own.prompt_tokens
    assert served.server.service.in_flight == 0


BAD_INFILLINGS = [
    ({}, 422, "template"),
    ({"template": "a"}, 400, "no gap"),
    ({"template": "a<gap>"}, 400, "no length"),
    ({"template": "a<gap:99>"}, 400, "room for 16"),
    ({"template": "a " * 99 + "<gap:2>"}, 400, "takes 64"),
    ({"template": "a<gap:2>", "prompt": "a " * 500}, 400, "takes 64"),
    ({"template": "a<gap:2>", "prompt": "a", "messages": []}, 400, "either"),
    ({"template": "a<gap:2>", "max_tokens": 3}, 400, "max_tokens"),
    ({"template": "a<gap:2>", "stop": "x"}, 400, "stop"),
    ({"template": "a<gap:2>", "logit_bias": {"1": 1}}, 400, "mask"),
    ({"template": "a<gap:2>", "treshold": 1}, 400, "threshold, top_k, top_p"),
]


@pytest.mark.parametrize("number", range(len(BAD_INFILLINGS)))
def test_a_bad_infilling_gets_an_error(served, number):
    body, status, words = BAD_INFILLINGS[number]
    answer = httpx.post(served.url + "/v1/infill", json=body, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, words in error["message"]) == (status, True), (answer.status_code, error)
    assert "\n" not in error["message"] and served.server.service.in_flight == 0


CHOICE = {"answer": ["yes", "no"], "urgency": [1, 2, 3, 4, 5]}


@pytest.mark.parametrize("options", [{}, {"gamma": 0.0}, {"joint": True, "temperature": 2.0}])
def test_a_decision_is_the_librarys(served, model, options):
    """Of several clients at once, beside answers; as one prompt and as a conversation."""
    asked = [f"Q: Is {number} even? A:" + " " * (number % 3) for number in range(6)]

    def call(prompt):
        body = {"prompt": prompt, "fields": CHOICE, "template": "{answer} {urgency}", "seed": 3, **options}
        answer = httpx.post(served.url + "/v1/decide", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        return answer.json()

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        others = [pool.submit(served.client.completions.create, model="tiny", prompt=PROMPT) for _ in range(2)]
        found = list(pool.map(call, asked))
        assert all(other.result().choices[0].text for other in others)
    wanted = decide(model, asked, CHOICE, template="{answer} {urgency}", seed=3, **options)
    for mine, own in zip(found, wanted, strict=True):
        assert mine["object"] == "decision" and mine["values"] == own.values and mine["seed"] == 3
        for name, shares in own.to_json()["probabilities"].items():
            assert mine["probabilities"][name] == pytest.approx(shares, abs=1e-4)
        assert mine["usage"]["prompt_tokens"] == own.prompt_tokens and mine["usage"]["forwards"] == own.nfe
        assert ("joint" in mine) == ("dependence" in mine) == ("joint" in options)
    body = {"messages": _user("Why?"), "fields": CHOICE, "template": "{answer} {urgency}"}
    chat = httpx.post(served.url + "/v1/decide", json=body, timeout=60).json()
    own = decide(model, "Why?", CHOICE, chat=True, template="{answer} {urgency}")
    assert chat["values"] == own.values and chat["usage"]["prompt_tokens"] == own.prompt_tokens
    assert served.server.service.in_flight == 0


BAD_DECISIONS = [
    ({}, 422, "fields"),
    ({"fields": CHOICE}, 400, "prompt"),
    ({"prompt": "a", "fields": {}}, 400, "fields"),
    ({"prompt": "a", "fields": {"a": ["x"]}}, 400, "at least two"),
    ({"prompt": "a", "fields": {"a": ["x", "\ud800"]}}, 422, "fields"),
    ({"prompt": "a", "fields": {"a": ["x", None]}}, 400, "None"),
    ({"prompt": "a", "fields": CHOICE, "template": "{answer}"}, 400, "urgency"),
    ({"prompt": "a", "fields": CHOICE, "template": "x " * 99 + "{answer}{urgency}"}, 400, "takes 16"),
    ({"prompt": "a", "fields": CHOICE, "temperature": 0}, 400, "temperature"),
    ({"prompt": "a", "fields": CHOICE, "max_tokens": 3}, 400, "max_tokens"),
    ({"prompt": "a", "fields": CHOICE, "stop": "x"}, 400, "stop"),
    ({"prompt": "a", "fields": CHOICE, "logit_bias": {"5": 1}}, 400, "logit_bias"),
    ({"prompt": "a", "fields": CHOICE, "threshold": 0.5}, 400, "threshold"),
    ({"prompt": "a", "fields": CHOICE, "stream": True}, 400, "stream"),
    (
        {"prompt": "a", "fields": {n: [*range(9)] for n in "abc"}, "template": "{a}{b}{c}", "joint": True},
        400,
        "fewer values",
    ),
    ({"prompt": [5] * 500, "fields": CHOICE}, 422, "prompt"),
    ({"prompt": "a " * 500, "fields": CHOICE}, 400, "takes 64"),
]


@pytest.mark.parametrize("number", range(len(BAD_DECISIONS)))
def test_a_bad_decision_gets_an_error(served, number):
    body, status, words = BAD_DECISIONS[number]
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(served.url + "/v1/decide", content=json.dumps(body), headers=headers, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, words in error["message"]) == (status, True), (answer.status_code, error)
    assert "\n" not in error["message"] and served.server.service.in_flight == 0


@pytest.mark.parametrize(("broken", "words"), [([None], "not finite"), (RuntimeError("no memory"), "mistake")])
def test_a_decision_that_fails_ends_alone(served, monkeypatch, broken, words):
    def answer(*_):
        if isinstance(broken, Exception):
            raise broken
        return broken

    monkeypatch.setattr(engine_thread, "answer_questions", answer)
    body = {"prompt": "a", "fields": CHOICE, "template": "{answer}{urgency}"}
    found = httpx.post(served.url + "/v1/decide", json=body, timeout=60)
    assert found.status_code == 500 and words in found.json()["error"]["message"]
    assert served.client.completions.create(model="tiny", prompt=PROMPT).choices[0].text
    assert served.server.service.in_flight == 0


def test_openais_client_raises_its_own_errors(served):
    with pytest.raises(openai.NotFoundError, match="other"):
        served.client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError, match="top_logprobs"):
        served.client.chat.completions.create(model="tiny", messages=_user("a"), logprobs=True, top_logprobs=3)
    with pytest.raises(openai.UnprocessableEntityError, match="role"):
        served.client.chat.completions.create(model="tiny", messages=[{"role": "robot", "content": "a"}])
    with pytest.raises(openai.NotFoundError):
        served.client.models.retrieve("other")
    assert [found.id for found in served.client.models.list()] == [served.client.models.retrieve("tiny").id] == ["tiny"]


def test_other_paths_methods_and_content_types_are_refused(served):
    assert httpx.get(served.url + "/nothing").status_code == 404
    assert httpx.get(served.url + "/v1/completions").status_code == 405
    for path in ("/", "/health", "/metrics", "/v1/models", "/v1/models/tiny"):
        assert (found := httpx.head(served.url + path)).status_code == 200 and not found.content
    plain = httpx.post(
        served.url + "/v1/completions", content='{"prompt": "a"}', headers={"Content-Type": "text/plain"}
    )
    assert plain.status_code == 400 and "application/json" in plain.json()["error"]["message"]
    rebound = httpx.get(served.url + "/v1/models", headers={"Host": "evil.example"})
    assert rebound.status_code == 400 and rebound.json()["error"]["code"] == "unknown_host"


def test_an_oversize_body_is_refused_however_it_comes(start, monkeypatch):
    monkeypatch.setattr(middleware, "DISCARD_SECONDS", 3600.0)  # nothing is waited for that has come
    with start(most_body=2000) as small:
        body = json.dumps({"prompt": "a" * 3_000_000}).encode()
        chunks = lambda: (body[at : at + 1000] for at in range(0, len(body), 1000))
        for content in (body, chunks()):
            answer = httpx.post(
                small.url + "/v1/completions", content=content, headers={"Content-Type": "application/json"}, timeout=60
            )
            assert answer.status_code == 413 and answer.json()["error"]["code"] == "too_large"
        with _connect(small.url) as client:
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            at_once = f"{head}Transfer-Encoding: chunked\r\n\r\nbb8\r\n{'a' * 3000}\r\n0\r\n\r\n"
            client.sendall(at_once.encode())
            assert _read_all(client)[0] == 413
        with pytest.raises(openai.APIStatusError, match="2000 bytes") as caught:
            _client(small.url).completions.create(model="tiny", prompt="a" * 5000)
        assert caught.value.status_code == 413
        with contextlib.suppress(httpx.TransportError):  # it may hang up before the answer is read
            assert httpx.get(small.url + "/health", headers={"X": "a" * 200_000}).status_code in (400, 431)
        assert _ask(small.url).status_code == 200


def _errors_of(kind, body):
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    return caught.value.error_count()


def test_a_body_of_many_wrong_items_is_one_error():
    """Each would cost some 5 kB and 50 us, in the event loop."""
    many, message = [None] * 100_000, {"role": "user", "content": "a"}
    for prompt in (many, [many], ["a", *many], [1, *many], [[1], *many]):
        assert _errors_of(TextBody, {"prompt": prompt}) == 1
    for body in (
        {"messages": many},
        {"messages": [{**message, "content": many}]},
        {"messages": [message], "stop": many},
        {"messages": [message], "stream_options": dict.fromkeys(map(str, range(100_000)))},
        {"messages": [[{}] * 1000] * 10},
    ):
        assert _errors_of(ChatBody, body) == 1


def test_names_in_errors_are_those_of_the_body(served):
    wrong = lambda **body: httpx.post(served.url + "/v1/chat/completions", json=body).json()["error"]["param"]
    assert wrong(messages=5) == "messages"
    assert wrong(messages=[{"role": "user", "content": 5}]) == "messages.0.content"
    assert wrong(messages=[{"role": "user", "content": [{"type": "text"}]}]) == "messages.0.content.0.text"


def test_a_prompt_that_is_surely_too_long_is_not_encoded(served, monkeypatch):
    encoded = []
    monkeypatch.setattr(prompts, "encode_pieces", lambda tokenizer, pieces: encoded.extend(pieces) or [5])
    for prompt in ("a " * 100_000, ["a " * 100_000]):
        error = _ask(served.url, prompt).json()["error"]
        assert error["code"] == "context_length_exceeded" and not encoded
    assert _ask(served.url, n=3).status_code == 200 and encoded == [PROMPT]


def test_encoding_has_a_tokenizer_of_its_own(served, model, monkeypatch):
    """The event loop decodes meanwhile, and a tokenizer that two threads use at a time may raise."""
    used = []
    encode = lambda model, *arguments, **options: used.append(model) or encode_prompt(model, *arguments, **options)
    monkeypatch.setattr(scheduler, "encode_prompt", encode)
    assert _ask(served.url).status_code == 200
    assert [other.tokenizer is model.tokenizer for other in used] == [False]


def test_forwards_of_an_answer_are_bounded(start):
    with start(sampler="remask", limits=Limits(deadline=None, forwards=24)) as small:
        assert _ask(small.url, steps=24).status_code == 200
        for steps in (26, 10**9):
            refused = _ask(small.url, steps=steps)
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "too_many_forwards")
        with pytest.raises(DllmError, match="max_forwards"):
            scheduler.Service(small.engine, Limits(forwards=LENGTH - 1))


def test_a_prompt_that_begins_like_another_is_read_once(start, model):
    config = model.config.replace(family="sdar", attention="block", block_length=BLOCK)
    blocks = dataclasses.replace(dllm_jax.random_model(config, key=2), tokenizer=model.tokenizer, name="tiny")
    with start(of=blocks, room={"cache": "exact", "prefix_cache": 1 << 20}) as found:
        ids = [[*range(40, 90)], [*range(40, 80), 33]]
        answer = lambda prompt, **own: _ask(found.url, prompt, seed=1, **own).json()
        usages = [answer(prompt, n=2)["usage"] for prompt in (ids[0], ids[1], ids)]
        assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages] == [0, 40, 48 + 40]
        choices = answer(ids[1])["choices"]
        assert _metric(found.url, 'dllm_tokens_total{kind="cached"}') == 48 + 2 * 40 + 2 * 48 + 2 * 40 + 40
    with start(of=blocks, room={"cache": "exact"}) as plain:
        assert choices == _ask(plain.url, ids[1], seed=1).json()["choices"]


def test_one_of_the_keys_is_asked_for(start):
    with start(keys=["another", SECRET]) as closed:
        assert _status(closed.url) == 200 and httpx.get(closed.url + "/").status_code == 200
        for path in ("/v1/models", "/metrics", "/nothing"):
            assert httpx.get(closed.url + path).status_code == 401
        for wrong in ("Bearer no", f"Basic {SECRET}", SECRET, "Bearer \xe9", f"Bearer {SECRET}x"):
            said = {"Authorization": wrong.encode("latin-1")}
            assert httpx.post(closed.url + "/v1/completions", json={}, headers=said).status_code == 401
        with pytest.raises(openai.AuthenticationError):
            _client(closed.url, "no").models.list()
        for key, status in ((SECRET, 200), ("no", 401)):
            body = {"max_tokens": 1, "messages": _user("a")}
            found = httpx.post(closed.url + "/v1/messages", headers={"x-api-key": key}, json=body, timeout=60)
            assert (found.status_code, found.json()["type"]) == (status, "message" if status == 200 else "error")
        for key in (SECRET, "another"):
            assert _client(closed.url, key).completions.create(model="tiny", prompt=PROMPT).choices


def test_without_room_for_drawing_a_temperature_is_refused(start):
    with start(room={"draws": False}) as plain:
        assert _ask(plain.url, temperature=0, top_p=1).status_code == 200
        refused = _ask(plain.url, temperature=0.5)
        assert refused.status_code == 400 and "temperature" in refused.json()["error"]["message"]


# Full, late, gone, broken, stopped ------------------------------------------------------------------------------------


def _gated(gate):
    """An engine whose steps wait until a gate is open."""

    def step(engine, usual):
        def call(count=1):
            assert gate.wait(60)
            return usual(count)

        return call

    return step


class Turnstile:
    """A gate for as many steps as it was told to let through."""

    def __init__(self):
        self._permits = threading.Semaphore(0)

    def let(self, count):
        self._permits.release(count)

    def wait(self, seconds):
        return self._permits.acquire(timeout=seconds)


def _asking(pool, url, count, **options):
    return [pool.submit(_ask, url, seed=i, **options) for i in range(count)]


def test_beyond_the_queue_there_is_a_429_and_what_was_admitted_is_answered(start, alone):
    gate = threading.Event()
    with (
        start(slots=2, limits=Limits(3, None), step=_gated(gate)) as small,
        concurrent.futures.ThreadPoolExecutor(8) as pool,
    ):
        first = _asking(pool, small.url, 5)
        wait_until(lambda: small.server.service.in_flight == 5)
        full = _ask(small.url)
        assert full.status_code == 429 and full.headers["Retry-After"]
        assert full.json()["error"]["type"] == "rate_limit_error"
        with pytest.raises(openai.RateLimitError):
            _client(small.url).completions.create(model="tiny", prompt="a")
        assert _status(small.url) == 200  # the event loop waits for nothing
        gate.set()
        texts = [answer.result().json()["choices"][0]["text"] for answer in first]
        assert texts == [alone(PROMPT, seed).text for seed in range(5)]
        assert _ask(small.url).status_code == 200
        assert _metric(small.url, 'dllm_requests_total{outcome="full",route="/v1/completions"}') == 2


def test_clients_take_turns(start):
    """A client that fills the queue with copies neither shuts others out nor makes them wait for all of its own."""
    turns, ended = Turnstile(), []
    with (
        start(slots=1, keys=["one", "two"], limits=Limits(3, None), step=_gated(turns)) as small,
        concurrent.futures.ThreadPoolExecutor(8) as pool,
    ):
        service = small.server.service

        def ask(key, **options):
            body, said = {"prompt": PROMPT, "max_tokens": 1, **options}, {"Authorization": f"Bearer {key}"}
            answer = httpx.post(small.url + "/v1/completions", json=body, headers=said, timeout=60)
            ended.append((key, answer.status_code))

        asked = [pool.submit(ask, "one", n=4)]
        wait_until(lambda: service.in_flight == 4 and small.engine.busy + small.engine.waiting == 1)
        ask("one")
        asked.append(pool.submit(ask, "two"))
        wait_until(lambda: service.in_flight == 5)
        turns.let(1000)
        for one in asked:
            one.result()
        assert ended == [("one", 429), ("two", 200), ("one", 200)]


def test_a_fair_queue():
    queue = FairQueue()
    for client, item in [("a", 1), ("a", 2), ("b", 3), ("a", 4), ("c", 5)]:
        queue.push(client, item)
    queue.remove("c", 5)
    queue.remove("a", 7)
    assert len(queue) == 4 and [queue.pop() for _ in range(len(queue))] == [1, 3, 2, 4]


def test_late_requests_are_cancelled(start):
    gate = threading.Event()
    with (
        start(slots=1, limits=Limits(deadline=3.0), step=_gated(gate)) as late,
        concurrent.futures.ThreadPoolExecutor(8) as pool,
    ):
        asked = _asking(pool, late.url, 2) + _asking(pool, late.url, 1, stream=True)
        whole, other, stream = (answer.result() for answer in asked)
        assert whole.status_code == other.status_code == 503
        assert whole.json()["error"]["code"] == "deadline_exceeded"
        assert stream.status_code == 200 and "deadline" in stream.text and "[DONE]" not in stream.text
        wait_until(lambda: late.server.service.in_flight == 0)
        gate.set()
        wait_until(lambda: late.engine.idle)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_slot(start, stream):
    turns = Turnstile()
    with start(slots=1, step=_gated(turns)) as slow:
        body = json.dumps({"prompt": PROMPT, "stream": stream}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        clients = []
        for count in range(1, 4):  # one in the slot, two that wait
            clients.append(_connect(slow.url))
            clients[-1].sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
            wait_until(lambda count=count: slow.server.service.in_flight == count)
        turns.let(1)
        wait_until(lambda: slow.engine.busy == 1)
        for client in reversed(clients):
            client.close()
        wait_until(lambda: slow.server.service.in_flight == 0)
        turns.let(9 * LENGTH)
        wait_until(lambda: slow.engine.idle)
        assert slow.engine.stats.steps < LENGTH  # not the steps of one answer
        gone = 'dllm_requests_total{outcome="gone",route="/v1/completions"}'
        wait_until(lambda: _metric(slow.url, gone) == 3)
        assert _ask(slow.url).status_code == 200


def test_when_the_engine_dies_every_client_gets_an_error(start):
    gate = threading.Event()

    def dying(engine, usual):
        def step(count=1):
            assert gate.wait(60)
            raise RuntimeError(f"the device is gone, and with it {SECRET}")

        return step

    with start(slots=1, step=dying) as found, concurrent.futures.ThreadPoolExecutor(8) as pool:
        found.may_fail = True
        asked = _asking(pool, found.url, 3) + _asking(pool, found.url, 2, stream=True)
        wait_until(lambda: found.server.service.in_flight == 5)
        gate.set()
        answers = [answer.result() for answer in asked]
        assert [answer.status_code for answer in answers[:3]] == [500] * 3
        assert {answer.status_code for answer in answers[3:]} <= {200, 500}  # streams that had begun, and not
        assert all("stopped by an error" in answer.text and SECRET not in answer.text for answer in answers)
        assert _status(found.url) in (503, None)
        with pytest.raises(DllmError, match="RuntimeError"):
            found.ended.result(timeout=30)


def test_an_engine_without_memory_ends_with_the_advice_of_the_command(start):
    """`run_printing` has it, for the error that it knows."""

    def dying(engine, usual):
        def step(count=1):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

        return step

    with start(slots=1, step=dying) as found:
        found.may_fail = True
        assert _ask(found.url).status_code == 500
        with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
            found.ended.result(timeout=30)


def test_of_several_faults_the_first_is_reported(start):
    """A server whose engine has died leaves, and breaks off what is still there once more."""
    gate = threading.Event()
    with start(slots=1, step=_gated(gate)) as found, concurrent.futures.ThreadPoolExecutor(8) as pool:
        asked = _asking(pool, found.url, 1) + _asking(pool, found.url, 1, stream=True)
        wait_until(lambda: len(found.server.service.tickets) == 2)
        end = lambda: [found.server.service.break_off(Fault(500, sentence)) for sentence in ("died", "leaves")]
        found.loop.call_soon_threadsafe(end)
        assert all("died" in answer.result().text and "leaves" not in answer.result().text for answer in asked)
        gate.set()


def test_at_the_end_what_runs_is_finished_and_nothing_new_begun(start, alone):
    turns = Turnstile()
    with start(slots=1, step=_gated(turns)) as slow, concurrent.futures.ThreadPoolExecutor(8) as pool:
        asked = _asking(pool, slow.url, 2) + _asking(pool, slow.url, 1, stream=True)
        turns.let(1)
        wait_until(lambda: slow.server.service.in_flight == 3 and slow.engine.busy)
        slow.server.handle_exit(signal.SIGINT, None)
        wait_until(lambda: slow.server.service.draining)
        assert _ask(slow.url).status_code == 503 and _status(slow.url) == 503
        turns.let(9 * LENGTH)
        *whole, stream = (answer.result() for answer in asked)
        assert [answer.json()["choices"][0]["text"] for answer in whole] == [alone(PROMPT, i).text for i in range(2)]
        assert stream.text.endswith("data: [DONE]\n\n")
        assert slow.ended.result(timeout=30) is None


def test_what_runs_longer_than_the_grace_is_broken_off_with_a_sentence(start):
    gate = threading.Event()
    with start(slots=1, step=_gated(gate), grace=0.1) as slow, concurrent.futures.ThreadPoolExecutor(8) as pool:
        (asked,) = _asking(pool, slow.url, 1)
        wait_until(lambda: slow.server.service.in_flight == 1)
        slow.server.handle_exit(signal.SIGTERM, None)
        assert asked.result().status_code == 503 and "stopping" in asked.result().text
        gate.set()
        assert slow.ended.result(timeout=30) is None


@pytest.mark.parametrize("count", [24, 200])
def test_many_streams_and_random_disconnects(start, alone, count):
    """All at once: whoever stays gets the answer of `generate`, and nothing is left behind.

    One that would leave may get its answer in fewer parts, and so stay.
    """
    rng = random.Random(0)
    leaving = {i: rng.randrange(3) for i in range(count) if rng.random() < 0.3}

    async def ask(client, i):
        got, stream = "", await client.completions.create(model="tiny", prompt=f"Q: {i}", seed=i, stream=True)
        async for number, part in _numbered(stream):
            if leaving.get(i, -1) == number:
                await stream.close()
                return None
            got += part.choices[0].text
        return got

    async def all_of(url):
        client = openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=300)
        async with client:
            return await asyncio.gather(*(ask(client, i) for i in range(count)))

    with start(slots=8, limits=Limits(count, None)) as found:
        texts = asyncio.run(all_of(found.url))
        left = {i for i in leaving if texts[i] is None}
        assert left and texts == [None if i in left else alone(f"Q: {i}", i).text for i in range(count)]
        wait_until(lambda: found.engine.idle and found.server.service.in_flight == 0)
        done = 'dllm_requests_total{outcome="done",route="/v1/completions"}'
        wait_until(lambda: _metric(found.url, done) >= count - len(leaving))


async def _numbered(stream):
    number = 0
    async for part in stream:
        yield number, part
        number += 1


# Clients that neither send nor read ----------------------------------------------------------------------------------


HALF_HEADER = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"


def _connect(url):
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def _read_all(client):
    """What a server sends until it closes: the status, and the body as JSON."""
    head, _, body = b"".join(iter(lambda: client.recv(65536), b"")).partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


@pytest.mark.parametrize(
    "sent", [b"", HALF_HEADER, b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"]
)
def test_silent_clients_keep_nobody_out(start, sent):
    with (
        start(connections=Connections(8, keep_seconds=3600, request_seconds=3600)) as found,
        contextlib.ExitStack() as stack,
    ):
        silent = [stack.enter_context(_connect(found.url)) for _ in range(30)]
        for client in silent:
            with contextlib.suppress(ConnectionError):  # some have been closed already
                client.sendall(sent)
        assert _status(found.url) == 200 and _ask(found.url).status_code == 200
        wait_until(lambda: len(found.server.server_state.connections) <= 8)
        with contextlib.suppress(ConnectionResetError):
            assert silent[0].recv(1) == b""  # those that were silent for longest make room


def test_a_header_that_does_not_come_is_waited_for_so_long(start):
    with start(connections=Connections(64, keep_seconds=2.0, request_seconds=1.0)) as found:
        with _connect(found.url) as silent, _connect(found.url) as begun, _connect(found.url) as again:
            begun.sendall(HALF_HEADER)
            again.sendall(HALF_HEADER + b"\r\n")
            first = b""
            while b"}" not in first:
                first += again.recv(65536)
            again.sendall(HALF_HEADER)
            assert silent.recv(1) == b""
            status, error = _read_all(begun)
            assert (status, error["code"]) == (408, "timeout")
            assert first.startswith(b"HTTP/1.1 200") and _read_all(again)[0] == 408


def _ask_health(client):
    """Asks over a connection, and reads the answer."""
    client.sendall(HALF_HEADER)
    client.sendall(b"\r\n")
    answer = b""
    while b"}" not in answer:
        answer += client.recv(65536)
    assert answer.startswith(b"HTTP/1.1 200")


def test_a_connection_stays_open_between_requests_longer_than_a_header_may_take(start):
    with start(connections=Connections(64, request_seconds=0.2)) as found, _connect(found.url) as client:
        for _ in range(2):
            time.sleep(0.6)
            _ask_health(client)


def test_a_connection_after_an_answer_is_closed_by_one_timer(start):
    """That of `Connections`: uvicorn's own would close it after 5 s whatever that says."""
    with start(connections=Connections(64, keep_seconds=1.0)) as found, _connect(found.url) as client:
        _ask_health(client)
        assert client.recv(1) == b""
    with start(connections=Connections(64)) as found, _connect(found.url) as client:
        _ask_health(client)

        async def timers():  # in the loop, so after all that an answer's end does
            return [own.timeout_keep_alive_task for own in found.server.server_state.connections]

        assert asyncio.run_coroutine_threadsafe(timers(), found.loop).result(60) == [None]


class Recorder(Connections):
    """Connections whose transports keep what they send, piece by piece."""

    def __init__(self):
        super().__init__(64)
        self.pieces = []

    def __call__(self, **options):
        made = super().__call__(**options)
        made.connection_made, real = (lambda transport: real(_Recording(transport, self.pieces))), made.connection_made
        return made


class _Recording:
    def __init__(self, transport, pieces):
        self._transport, self._pieces = transport, pieces

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def write(self, data):
        self._pieces.append(bytes(data))
        self._transport.write(data)


def test_what_belongs_together_is_sent_in_one_piece(start):
    """A server that is killed has sent all of a short answer or nothing, and a [DONE] with the end of its answer."""
    with start(connections=(sent := Recorder())) as found:
        for ask in (lambda: _ask(found.url), lambda: httpx.get(found.url + "/health"), lambda: _ask(found.url, 1)):
            sent.pieces.clear()
            answer = ask()
            (piece,) = sent.pieces
            assert piece.startswith(b"HTTP/1.1 ") and piece.endswith(answer.content) and answer.content
        sent.pieces.clear()
        assert _ask(found.url, stream=True).status_code == 200
        assert sent.pieces[0].startswith(b"HTTP/1.1 200") and len(sent.pieces) > 2
        assert not any(b"[DONE]" in piece for piece in sent.pieces[:-1])
        assert b"[DONE]" in sent.pieces[-1] and sent.pieces[-1].endswith(b"\r\n0\r\n\r\n")
        sent.pieces.clear()
        with _connect(found.url) as client:
            client.sendall(b"not http\r\n\r\n")
            assert _read_all(client)[0] == 400 and len(sent.pieces) == 1


def test_a_client_that_does_not_read_is_closed(start):
    with start(connections=Connections(64, read_seconds=0.5)) as found, _connect(found.url) as client:
        wait_until(lambda: len(found.server.server_state.connections) == 1)
        client.setblocking(False)
        with contextlib.suppress(BlockingIOError):  # its own buffer is full, since the server reads no more
            for _ in range(20_000):
                client.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        wait_until(lambda: not found.server.server_state.connections)


def test_where_all_connections_are_in_use_a_new_one_is_refused(start):
    gate = threading.Event()
    options = {"step": _gated(gate), "connections": Connections(3)}
    with start(slots=1, **options) as found, concurrent.futures.ThreadPoolExecutor(8) as pool:
        asked = _asking(pool, found.url, 3)
        wait_until(lambda: found.server.service.in_flight == 3)
        with _connect(found.url) as client:
            status, error = _read_all(client)
        assert (status, error["code"]) == (503, "too_many_connections")
        gate.set()
        assert [answer.result().status_code for answer in asked] == [200] * 3


def test_what_is_not_http_is_answered_in_json(served):
    with _connect(served.url) as client:
        client.sendall(b"not http\r\n\r\n")
        status, error = _read_all(client)
    assert (status, error["code"]) == (400, "invalid_http")


def test_a_body_that_is_unfinished_at_the_end_is_answered_in_json(start, monkeypatch):
    monkeypatch.setattr(server, "SHUTDOWN_SECONDS", 0.0)
    with start(grace=0.1) as found, _connect(found.url) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
        wait_until(lambda: found.server.server_state.tasks)
        found.server.handle_exit(signal.SIGINT, None)
        status, error = _read_all(client)
    assert (status, error["code"]) == (503, "stopping")


def test_the_limit_of_open_files_bounds_the_connections(monkeypatch):
    used = len(os.listdir("/dev/fd"))
    for limit, wanted in [(used + 1000, 100), (used + SPARE_FILES + 50, 50)]:
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        assert abs(connection_limit(100) - wanted) < 5  # other tests' threads open files as well
    monkeypatch.setattr(resource, "getrlimit", lambda _: (used, used))
    with pytest.raises(DllmError, match="ulimit -n"):
        connection_limit(100)


def _command(model):
    served = [sys.executable, "-m", "samplers", "serve", "--model", str(model.folder), "--port", "0"]
    return [*served, *SMALL, "--prompt-length", "32", "--slots", "2"]


def test_with_few_open_files_silent_clients_stop_nothing(llada_tiny, tmp_path):
    limited = ["bash", "-c", 'ulimit -n 100; exec "$@"', "-", *_command(llada_tiny)]
    log = tmp_path / "log"
    with contextlib.ExitStack() as stack:
        err = stack.enter_context(log.open("w"))
        process = stack.enter_context(subprocess.Popen(limited, stdout=subprocess.PIPE, stderr=err, text=True))
        stack.callback(process.kill)
        url = process.stdout.readline().split()[-1]
        wait_until(lambda: _status(url) == 200)
        for _ in range(200):
            stack.enter_context(_connect(url))
        statuses = [_status(url) for _ in range(5)], _ask(url, "Q: swine").status_code
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert statuses == ([200] * 5, 200) and log.read_text().count("\n") < 50


def test_the_log_has_so_many_lines_a_second(caplog):
    now = [0.0]
    rate = LogRate(3, clock=lambda: now[0])
    logger = logging.getLogger("test of the rate")
    logger.addFilter(rate)
    with caplog.at_level("INFO", logger=logger.name):
        for i in range(10):
            logger.info("line %d", i)
        now[0] = 1.0
        logger.info("line %d", 10)
    assert caplog.messages == ["line 0", "line 1", "line 2", "(7 lines dropped) line 10"]


# What operators see ---------------------------------------------------------------------------------------------------


def test_metrics_count_what_was_done(served):
    names = ('tokens_total{kind="completion"}', "forwards_total", "last_token_seconds_count", "step_seconds_count")
    before = [_metric(served.url, f"dllm_{name}") for name in names]
    usage = _ask(served.url).json()["usage"]
    tokens, forwards, answers, steps = (
        _metric(served.url, f"dllm_{name}") - at for name, at in zip(names, before, strict=True)
    )
    assert (tokens, forwards, answers) == (usage["completion_tokens"], usage["forwards"], 1)
    assert steps >= usage["forwards"]
    assert (_metric(served.url, "dllm_slots"), _metric(served.url, "dllm_queue_length")) == (4, 0)


def test_the_log_has_no_word_of_clients(served, caplog):
    with caplog.at_level("INFO", logger=middleware.LOG.name):
        _ask(served.url, SECRET, stop=[SECRET])
        _ask(served.url, SECRET, user=SECRET, **{SECRET: SECRET})
        httpx.get(f"{served.url}/{SECRET}?{SECRET}", headers={"User-Agent": SECRET})
        httpx.request(SECRET, served.url)
    assert SECRET not in caplog.text and "POST /v1/completions 200" in caplog.text and "GET other 404" in caplog.text


def test_an_unforeseen_error_shows_nothing_of_its_message(served, monkeypatch, caplog):
    def fail(*arguments):
        raise ValueError(SECRET)

    monkeypatch.setattr(scheduler, "answer_of", fail)
    whole, stream = _ask(served.url), _ask(served.url, stream=True)
    assert whole.status_code == 500 and whole.json()["error"]["type"] == "server_error"
    assert "made a mistake" in stream.text and "[DONE]" not in stream.text
    assert SECRET not in whole.text + stream.text + caplog.text and "ValueError at" in caplog.text


def test_the_command_serves_and_ends_at_an_interrupt(llada_tiny):
    settings = {**os.environ, "DLLM_API_KEY": SECRET}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(_command(llada_tiny), env=settings, **pipes) as process:
        line = process.stdout.readline()
        url = line.split()[-1]
        found = _client(url, SECRET).completions.create(model="llada-tiny", prompt="Q: swine", seed=1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    options = {"gen_length": 8, "block_length": 8, "cache": "none"}
    assert found.choices[0].text == generate(llada_tiny, ["Q: swine"], seed=1, **options)[0].text
    assert (process.returncode, out) == (0, "")
    assert line.startswith("serving llada-tiny (threshold=0.9") and "2 slots" in line
    assert "POST /v1/completions 200" in err and "swine" not in err and SECRET not in err


def test_mistakes_of_the_command_are_one_sentence(llada_tiny, capsys, monkeypatch, tmp_path):
    """Before the weights are read."""
    monkeypatch.setattr(dllm_jax, "load", lambda *about, **options: pytest.fail("too late"))
    folder = ["--model", str(llada_tiny.folder)]
    (tmp_path / "key").write_text("")
    taken = server.bind_socket("127.0.0.1", 0)
    taken.listen()
    for said, words in [
        ([], "--model"),
        ([*folder, "--slots", "0", "--port", "0"], "slots"),
        ([*folder, "--sampler", "d2f", "--top-logprobs", "3", "--port", "0"], "top_logprobs"),
        ([*folder, "--sampler", "leftright", "--constraint-states", "32", "--port", "0"], "constraint_states"),
        ([*folder, "--prefix-cache", "8", "--port", "0"], "prefix_cache"),
        ([*folder, "--port", "99999"], "port"),
        ([*folder, "--port", str(taken.getsockname()[1])], "cannot listen"),
        ([*folder, "--host", "nowhere.invalid"], "cannot listen"),
        ([*folder, "--api-key-file", str(tmp_path / "key")], "key"),
        ([*folder, "--rule", "no"], "no"),
        ([*folder, "--prompt-length", "9999", "--port", "0"], "9999"),
        (["prompt", *folder], "unrecognized"),
    ]:
        assert cli.main(["serve", *said]) == 2
        err = capsys.readouterr().err
        assert err.startswith("error: ") and err.count("\n") == 1 and words in err
    taken.close()
    for name in [name for name in sys.modules if name.startswith("samplers.serving.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    assert cli.main(["serve", *folder]) == 2
    assert "pip install 'dllm_jax[serve]'" in capsys.readouterr().err


def test_a_tokenizer_that_cannot_write_special_tokens_as_text_is_refused_first(model, llada_tiny, capsys, monkeypatch):
    """Before the weights are read, and before a program is compiled."""

    def refuse(tokenizer):
        raise DllmError("the tokenizer cannot")

    def never(*about, **options):
        raise AssertionError("too late")

    monkeypatch.setattr(cli_of_server, "without_special_tokens", refuse)
    monkeypatch.setattr(dllm_jax, "load", never)
    assert cli.main(["serve", "--model", str(llada_tiny.folder), "--port", "0"]) == 2
    assert capsys.readouterr().err == "error: the tokenizer cannot\n"
    monkeypatch.setattr(scheduler, "without_special_tokens", refuse)
    monkeypatch.setattr(Engine, "compile", never)
    with server.bind_socket("127.0.0.1", 0) as at, pytest.raises(DllmError, match="cannot"):
        asyncio.run(server.serve(Engine(model, "threshold", prompt_length=64, **SHAPE), at, NONE))


def test_a_deadline_of_none_is_no_deadline(llada_tiny, monkeypatch):
    limits = []

    async def serve(engine, at, found, **options):
        at.close()
        limits.append(found)

    monkeypatch.setattr(server, "serve", serve)
    third = ["--deadline", "5", "--max-forwards", "9", "--no-clamp", "--allow-special-tokens"]
    for words in ([], ["--deadline", "0"], third):
        assert cli.main(["serve", "--model", str(llada_tiny.folder), "--port", "0", *SMALL, *words]) == 0
    assert limits == [Limits(64, 600.0, None), Limits(64, None, None), Limits(64, 5.0, 9, False, True)]


def test_the_word_serve_can_be_a_prompt(llada_tiny, capsys):
    assert cli.main(["--model", str(llada_tiny.folder), "serve", *SMALL]) == 0
    assert capsys.readouterr().out


# The page -------------------------------------------------------------------------------------------------------------


def test_the_page_loads_nothing_and_is_let_run_nothing_else(served):
    answer = httpx.get(served.url + "/")
    policy = answer.headers["Content-Security-Policy"]
    assert answer.text == page.PAGE and "default-src 'none'" in policy and "unsafe" not in policy
    assert not re.search(r"https?://|innerHTML|<link|src=", page.PAGE)


@pytest.fixture
def browser(tmp_path):
    if CHROMIUM is None:
        pytest.skip("there is no Chromium on this machine")
    found = Browser(tmp_path)
    yield found
    found.close()


def test_a_browser_shows_the_canvas_being_written(start, browser, alone):
    """Forward by forward: the next begins when the one before has been drawn."""
    prompt, turns = 'Q: <img src=x onerror="document.title=1"> \u6f22\n', Turnstile()
    wanted = alone(prompt, 8, threshold=0.004)
    with start(step=_gated(turns)) as found:
        browser.open(found.url + "/")
        browser.run(f"""
            window.seen = {{}};
            new MutationObserver(() => {{
              const spans = [...document.querySelectorAll("#canvas span")];
              seen[document.getElementById("state").textContent] = spans.map(span => span.className || "final");
            }}).observe(document.body, {{childList: true, subtree: true, characterData: true}});
            document.getElementById("prompt").value = {json.dumps(prompt)};
            document.getElementById("seed").value = 8;
            document.getElementById("numbers").value = "threshold=0.004";
            document.getElementById("delay").value = 20;
            document.getElementById("form").requestSubmit();
        """)
        states = [f"forward {count} \u00b7 1 of 4 slots busy \u00b7 0 waiting" for count in range(1, wanted.nfe)]
        states.append(f"forward {wanted.nfe} \u00b7 0 of 4 slots busy \u00b7 0 waiting")
        for state in states:
            turns.let(1)
            browser.wait(f"{json.dumps(state)} in seen")
        browser.wait("document.getElementById('state').dataset.done === 'yes'")
    frames = [browser.run(f"seen[{json.dumps(state)}]") for state in states]
    assert sum(frame.count("fresh") for frame in frames) == LENGTH and all("fresh" in frame for frame in frames)
    masks = [frame.count("mask") for frame in frames]
    assert masks == sorted(set(masks), reverse=True) and masks[-1] == 0
    assert browser.run("document.getElementById('answer').textContent") == wanted.text
    state = browser.run("document.getElementById('state').textContent")
    assert f"{len(wanted.tokens)} tokens in {wanted.nfe} forwards \u00b7 seed 8" in state
    assert browser.run("document.title") != "1" and browser.run("document.images.length") == 0
    picture = browser.picture()
    assert picture.startswith(b"\x89PNG") and len(picture) > 5000


def test_a_browser_shows_errors(served, browser):
    browser.open(served.url + "/")
    browser.run("document.getElementById('prompt').value = 'a'; document.getElementById('numbers').value = 'bogus=1'")
    browser.run("document.getElementById('form').requestSubmit()")
    browser.wait("document.getElementById('state').textContent.includes(\"'bogus' cannot be set\")")


def test_answers_have_the_form_that_is_asked_for(start):
    """response_format as OpenAI's, regex beside it; each body that cannot be kept is one sentence."""
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    number = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}
    with start(room={"constraint_states": 320, "draws": False}, slots=2) as found:
        client = _client(found.url)
        chat = lambda **options: client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Hi"}], seed=1, **options
        )
        assert json.loads(chat(response_format=named).choices[0].message.content)["a"] in (1, 2)
        assert type(json.loads(chat(response_format={"type": "json_object"}).choices[0].message.content)) is dict
        assert re.fullmatch("[a-f]{3}", chat(extra_body={"regex": "[a-f]{3}"}).choices[0].message.content)
        pieces = client.completions.create(
            model="tiny", prompt=PROMPT, seed=1, stream=True, extra_body={"regex": "x?[0-9]{2}"}
        )
        assert re.fullmatch("x?[0-9]{2}", "".join(chunk.choices[0].text for chunk in pieces))
        for path, body, pattern in [
            ("canvas", {"prompt": PROMPT, "regex": "x?[0-9]{2}"}, "x?[0-9]{2}"),
            ("canvas", {"messages": _user("Hi"), "response_format": named}, r'{ ?"a" ?: ?[12] ?}'),
            ("infill", {"template": "It is<gap:4>.", "regex": " [0-9]{3}."}, r"It is [0-9]{3}\."),
            ("infill", {"template": "It is <gap:3>", "response_format": number}, r"It is -?[0-9]+"),
            ("infill", {"template": "<gap:3> to<gap:2>", "regex": ["[a-c]+", None]}, "(?s)[a-c]{3} to.*"),
        ]:
            answer = httpx.post(f"{found.url}/v1/{path}", json={**body, "seed": 1}, timeout=120)
            last = [line for line in answer.text.splitlines() if "{" in line][-1]
            assert re.fullmatch(pattern, json.loads(last.removeprefix("data: "))["text"]), answer.text
        for path, body, word in [
            ("canvas", {"prompt": PROMPT, "regex": "("}, "regex"),
            ("canvas", {"prompt": PROMPT, "regex": "a", "stop": "b"}, "stop"),
            ("infill", {"template": "It is<gap:4>.", "regex": "[0-9]{3}."}, "given"),
            ("infill", {"template": "It is<gap:4>.", "regex": ["a+", "b+"]}, "number of gaps 1"),
            ("infill", {"template": "It is<gap:4>.", "regex": "a+", "response_format": number}, "give one"),
        ]:
            answer = httpx.post(f"{found.url}/v1/{path}", json=body, timeout=60)
            assert answer.status_code == 400 and word in answer.json()["error"]["message"], answer.text
        plain = chat(response_format={"type": "text"}).choices[0].message.content
        assert plain == chat().choices[0].message.content
        for options, word in [
            ({"extra_body": {"regex": "("}}, "regex"),
            ({"extra_body": {"regex": "[a-z]{999}"}}, "states"),
            ({"extra_body": {"regex": "é{40}"}}, "tokens"),
            ({"extra_body": {"regex": "a+"}, "stop": "b"}, "stop"),
            ({"extra_body": {"regex": "a+"}, "response_format": named}, "regex"),
            ({"response_format": {"type": "json_schema"}}, "json_schema"),
            ({"response_format": {**named, "json_schema": {"name": "x", "schema": {"minimum": 3}}}}, "minimum"),
        ]:
            with pytest.raises(openai.BadRequestError, match=word):
                chat(**options)


def test_tools_are_called(start, model):
    """By an answer that must, one that may, and in a stream; what the next turn brings reaches the template."""
    tokenizer = copy.deepcopy(model.tokenizer)
    tokenizer.chat_template = test_calls.TEMPLATE
    own, room = dataclasses.replace(model, tokenizer=tokenizer), {"gen_length": 112, "block_length": 112}
    number = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": number}}]
    form = r'<think>[ab]{2}</think>(yes)<tool_call>\{"name": "f", "arguments": \{"a": [12]\}\}</tool_call>'
    with start(of=own, room={**room, "prompt_length": 140, "constraint_states": 160}, slots=2) as found:
        client = _client(found.url)

        def chat(messages=({"role": "user", "content": "Hi"},), **options):
            return client.chat.completions.create(model="tiny", messages=messages, seed=1, tools=tools, **options)

        for choice in ("required", {"type": "function", "function": {"name": "f"}}):
            answer = chat(tool_choice=choice).choices[0]
            (call,) = answer.message.tool_calls
            assert call.function.name == "f" and json.loads(call.function.arguments)["a"] in (1, 2)
            assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
        answer = chat(extra_body={"regex": form}).choices[0]
        assert answer.message.content == "yes" and answer.message.reasoning_content in ("aa", "ab", "ba", "bb")
        assert answer.message.tool_calls[0].function.name == "f" and answer.finish_reason == "tool_calls"
        deltas = [part.choices[0] for part in chat(extra_body={"regex": form}, stream=True)]
        assert "".join(one.delta.content or "" for one in deltas) == "yes"
        assert (
            "".join(getattr(one.delta, "reasoning_content", "") for one in deltas) == answer.message.reasoning_content
        )
        (streamed,) = [call for one in deltas for call in one.delta.tool_calls or []]
        assert streamed.function.arguments == answer.message.tool_calls[0].function.arguments
        assert deltas[-1].finish_reason == "tool_calls"
        turns = [answer.message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": "1", "content": "7"}]
        opened = chat(turns, tool_choice="none", extra_body={"chat_template_kwargs": {"enable_thinking": True}})
        read = f"assistant: <think>{answer.message.reasoning_content}</think>yes<tool_call>"
        read += f'{{"name": "f", "arguments": {streamed.function.arguments}}}</tool_call>\ntool: 7\nassistant: <think>'
        assert opened.usage.prompt_tokens == len(encode_text(tokenizer, read))
        assert opened.choices[0].message.reasoning_content is not None
        raw = chat(tool_choice="none", extra_body={"regex": form, "separate_reasoning": False}).choices[0].message
        assert raw.content.startswith("<think>") and raw.tool_calls is None
        with pytest.raises(openai.BadRequestError, match="takes no 'color'"):
            chat(extra_body={"chat_template_kwargs": {"color": "red"}})


def test_tools_need_a_template_that_takes_them(served):
    tools = [{"type": "function", "function": {"name": "f"}}]
    for options, word in [({}, "not read here"), ({"tool_choice": "required"}, "constraint_states")]:
        with pytest.raises(openai.BadRequestError, match=word):
            served.client.chat.completions.create(model="tiny", messages=_user("a"), tools=tools, **options)


def test_a_form_needs_a_server_with_room_for_it(served):
    with pytest.raises(openai.BadRequestError, match="constraint_states"):
        served.client.completions.create(model="tiny", prompt=PROMPT, extra_body={"regex": "a+"})
    answer = httpx.post(served.url + "/v1/infill", json={"template": "a<gap:2>", "regex": "[ab]+"}, timeout=60)
    assert answer.status_code == 400 and "constraint_states" in answer.json()["error"]["message"]
