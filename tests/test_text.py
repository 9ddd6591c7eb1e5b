"""Text of growing generations: every tokenizer that loads, any tokens, any pieces, any stop strings."""

import itertools
from types import SimpleNamespace

import jax
import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

import samplers
from dllm_jax import DllmError
from dllm_jax.text.tokenizer import load_tokenizer, settled_test
from samplers import TextStream, text_of
from samplers.text.prompts import encode_prompt, pad_prompts

# Every kind of trouble: parts of characters, bytes by name, spaces as marks, suffixes, repetitions, and clean-up.
PIECES = ["a", "b", "ab", "A", "Ġ", "Ġa", "Ċ", "Ã", "©", "ð", "Ł", "Ļ", "Ĥ", "ÿ", "▁", "▁a", "▁▁b", "é", "🙂", "", " "]
PIECES += ["<0xC3>", "<0xA9>", "<0xF0>", "<0x9F>", "<0x99>", "<0x82>", "<0xFF>", "<0x61>", "##a", "##b", ".", "n't"]
PIECES += ["a</w>", "</w>", "b</w>c", "</w></w>", "|", "<pad>", "'", "▁x▁", "x"]
SPECIAL = {"<|eos|>": 60, "<|eot|>": 61, "<|other|>": 62}
PLAIN = "<tool>"
SIZE = 66  # some ids are nobody's

REPLACE = decoders.Replace("▁", " ")
DECODERS = {
    "byte-level": decoders.ByteLevel(),
    "plain": decoders.Fuse(),
    "none": None,
    "wordpiece": decoders.WordPiece(),
    "wordpiece, untidy": decoders.WordPiece(cleanup=False),
    "metaspace": decoders.Metaspace(),
    "metaspace, later": decoders.Sequence([decoders.Fuse(), decoders.Metaspace(prepend_scheme="first")]),
    "llama": decoders.Sequence([REPLACE, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
    "gemma": decoders.Sequence([REPLACE, decoders.ByteFallback(), decoders.Fuse()]),
    "strip two": decoders.Sequence([REPLACE, decoders.Fuse(), decoders.Strip(" ", 2, 0)]),
    "bytes and spaces": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    "bpe": decoders.BPEDecoder("</w>"),
    "ctc": decoders.CTC(),
    "pattern": decoders.Sequence([decoders.Fuse(), decoders.Replace(Regex("ab+"), "x")]),
    "several characters": decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "x")]),
    "one character": decoders.Sequence([decoders.Fuse(), decoders.Replace("a", "xy")]),
    "bytes of marks": decoders.Sequence([REPLACE, decoders.ByteLevel()]),
    "bpe, joined": decoders.Sequence([decoders.Fuse(), decoders.BPEDecoder("</w>")]),
    "nested": decoders.Sequence([decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "x")])]),
}
WAITING = {"pattern", "several characters", "strip two", "bpe, joined", "nested"}


@pytest.fixture(scope="module")
def all_models(tmp_path_factory):
    """Name of a decoder -> a model, as far as text goes, whose tokenizer was loaded from a file."""

    def made(name):
        vocab = {piece: i for i, piece in enumerate(PIECES)} | SPECIAL | {PLAIN: 63}
        core = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="?"))
        core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
        core.decoder = DECODERS[name]
        core.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
        core.add_tokens([AddedToken(PLAIN, normalized=False)])
        folder = tmp_path_factory.mktemp("tokenizer")
        core.save(str(folder / "tokenizer.json"))
        config = SimpleNamespace(eos_id=60, end_ids=(60, 61), vocab_size=SIZE)
        return SimpleNamespace(tokenizer=load_tokenizer(folder), config=config)

    return {name: made(name) for name in DECODERS}


def ids_of(*pieces):
    vocab = {piece: i for i, piece in enumerate(PIECES)} | SPECIAL | {PLAIN: 63}
    return [vocab[piece] for piece in pieces]


def streamed(model, tokens, cuts, stop=(), **options):
    """What a stream returned, in pieces, when it was fed up to each of these lengths, and then the end."""
    stream = TextStream(model, stop, **options)
    parts = [stream.feed(tokens[:cut]) for cut in sorted(cuts)]
    parts.append(stream.finish(tokens))
    assert "".join(parts) == stream.text
    return parts


TEXT_IDS = [i for i in range(SIZE) if i not in (60, 61)]
tokens_of = st.lists(st.sampled_from(TEXT_IDS), max_size=14)
cuts_of = st.lists(st.integers(0, 14), max_size=8)
stops_of = st.lists(
    st.sampled_from(["a", "ab", "aba", "bab", " ", "é", "éa", "🙂🙂", "\ufffd", "never", "b a"]), max_size=3
)


@pytest.mark.parametrize("name", DECODERS)
@settings(max_examples=150)
@given(tokens=tokens_of, cuts=cuts_of, stops=stops_of)
@example(tokens=ids_of("<0xC3>", "<0xA9>", "<0xFF>"), cuts=[1, 2, 3], stops=[])
@example(tokens=ids_of("b</w>c", "a"), cuts=[1], stops=[])
@example(tokens=ids_of("▁", "▁", "▁a"), cuts=[1, 2, 3], stops=[])
@example(tokens=ids_of("a", "b", "a", "b"), cuts=[1, 2, 3], stops=["b", "abab"])
def test_a_stream_is_the_text_of_the_whole(all_models, name, tokens, cuts, stops):
    """However it is cut; what finish gets may end anywhere behind what was fed."""
    model = all_models[name]
    parts = streamed(model, tokens, cuts, stops)
    assert "".join(parts) == text_of(model, tokens, stops)
    if name in WAITING:
        assert not any(parts[:-1])


@pytest.mark.parametrize("name", ["byte-level", "llama", "wordpiece", "bpe"])
@settings(max_examples=100)
@given(tokens=tokens_of, behind=st.lists(st.integers(0, SIZE - 1), max_size=5), end=st.sampled_from([60, 61, 0]))
def test_what_lies_behind_an_end_is_never_shown(all_models, name, tokens, behind, end):
    model = all_models[name]
    tokens = [token for token in tokens if token != end]
    stream = TextStream(model, [0])
    for cut in range(len(tokens) + len(behind) + 1):
        stream.feed([*tokens, end, *behind][: cut + 1])
    stream.finish(tokens)
    assert stream.text == text_of(model, tokens)


def test_only_what_must_wait_does(all_models):
    """The text is not kept back longer than it has to be."""
    model = all_models["byte-level"]
    tokens = ids_of("a", "Ġ", "Ã", "©", "ð", "Ł", "Ļ", "Ĥ", "A", "ÿ")
    assert streamed(model, tokens, range(11)) == ["", "a", " ", "", "é", "", "", "", "🙂", "A", "", "\ufffd"]
    tokens = ids_of("A", "a", "b", "a", "A", "a", "b")
    assert streamed(model, tokens, range(8), ["aba", "bb"]) == ["", "A", "", "", "", "", "", "", ""]
    assert streamed(model, tokens, range(8), ["abb"]) == ["", "A", "", "", "ab", "aA", "", "", "ab"]
    model = all_models["llama"]
    tokens = ids_of("▁a", "▁", "<0xC3>", "<0xA9>", "<|other|>", "<0x61>", "b", "▁a")
    assert streamed(model, tokens, range(9)) == ["", "a", " ", "", "", "", "", "éab", " a", ""]
    assert {name for name, one in all_models.items() if settled_test(one.tokenizer) is None} == WAITING


def test_end_tokens_may_be_ignored(all_models):
    model, tokens = all_models["byte-level"], [0, 61, 1]
    assert streamed(model, tokens, range(4)) == ["", "a", "", "", "b"]
    assert streamed(model, tokens, range(4), ignore_eos=True) == ["", "a", "", "b", ""]


def test_without_a_tokenizer_there_is_no_text(all_models):
    model = SimpleNamespace(tokenizer=None, config=all_models["plain"].config)
    assert streamed(model, [1, 2, 3], [1, 2, 3]) == ["", "", "", ""] and text_of(model, [1]) == ""


def test_tokens_that_were_not_final_are_noticed(all_models):
    stream = TextStream(all_models["plain"])
    assert stream.feed([0, 1]) == "ab"
    with pytest.raises(DllmError, match="tokens that were fed"):
        stream.finish([0, 0])


def test_a_model_s_answer_can_be_watched(llada_tiny):
    """Fed with what is final after every forward, a stream gives the answer of `generate`."""
    options = {"gen_length": 24, "block_length": 8, "stop": ["1"], "rule": "topk", "k": 3}
    answer = samplers.generate(llada_tiny, "Q: 12 + 23 =", **options)
    sampler = samplers.make_sampler(llada_tiny, **options)
    prompt, lengths = pad_prompts([encode_prompt(llada_tiny, "Q: 12 + 23 =")])
    stream, shown = TextStream(llada_tiny, options["stop"]), []
    for state in samplers.stream(sampler, llada_tiny.denoiser, prompt, lengths, key=jax.random.key(0)):
        result = jax.device_get(sampler.result(llada_tiny.denoiser, state))
        final = len(list(itertools.takewhile(lambda at: at >= 0, result.decoded_at[0])))
        shown.append(stream.feed(result.tokens[0][:final]))
    shown.append(stream.finish(answer.tokens))
    assert "".join(shown) == answer.text and len(answer.text) > 0
