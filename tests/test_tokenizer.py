"""Tokenizers from real file formats, chat texts as published, and the bytes of single tokens."""

import json
import random

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from dllm_jax import chat
from dllm_jax.config import ModelConfig
from dllm_jax.errors import DllmError
from dllm_jax.tokenizer import ASCII_VOCAB, Tokenizer, has_tokenizer

SENTENCES = [
    "Diffusion language models write all words at once, not one after the other.",
    "In 2025 the first of them caught up: 8 billion parameters, 2.3 trillion tokens.",
    "Übermäßig viele Umlaute: äöüß, ein Gedankenstrich — und 日本語 🙂🙂.",
    "def add(a, b):\n    return a + b\n\n\nprint(add(12, 345))",
]
TEXTS = [
    *SENTENCES,
    "",
    " ",
    "  two  spaces\t and tabs \n\n",
    "1234567890 12,345.67",
    "It's we'll THEY'RE",
    "e\u0301 is not NFC",
    "👩‍👩‍👧 and 𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
    "a\u00a0b\u2028c",
]
# As in Qwen2's published tokenizer.json; written out again so that the tested module is not its own reference.
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BPE_SIZE = 400
# Ids with a hole behind the learned ones, and one added token that is not special, as Qwen2.5's <tool_call>.
ADDED = {
    "<|endoftext|>": 400,
    "<|im_start|>": 401,
    "<|im_end|>": 402,
    "<tool_call>": 403,
    "<|bos|>": 410,
    "<|mask|>": 411,
}
PLAIN = "<tool_call>"


def config(family="dream", vocab_size=416, **changes):
    ids = {"eos_id": 400, "pad_id": 400, "mask_id": 411, "end_ids": (400, 402), "bos_id": 410}
    sizes = {"embed_dim": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "mlp_dim": 16}
    rest = {"rope_theta": 1e4, "norm_eps": 1e-6, "max_length": 64}
    return ModelConfig(family=family, vocab_size=vocab_size, **{**sizes, **rest, **ids, **changes})


def ascii_config(**changes):
    ids = {"eos_id": 128, "pad_id": 128, "mask_id": 129, "end_ids": (128, 131), "bos_id": None}
    return config("llada", 136, **{**ids, **changes})


def trained_core():
    core = tokenizers.Tokenizer(models.BPE())
    core.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(QWEN2_SPLIT), behavior="isolated")
    core.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=BPE_SIZE, initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator(SENTENCES * 3, trainer)
    assert core.get_vocab_size() == BPE_SIZE
    return core


def dream_settings(**changes):
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    decoder = {str(i): {"content": token, "special": token != PLAIN, **flags} for token, i in ADDED.items()}
    return {
        "added_tokens_decoder": decoder,
        "auto_map": {"AutoTokenizer": ["tokenization_remote.RemoteTokenizer", None]},
        "tokenizer_class": "DreamTokenizer",
        "bos_token": "<|bos|>",
        "eos_token": {"content": "<|endoftext|>", "lstrip": False},
        "mask_token": "<|mask|>",
        "unk_token": None,
        "model_max_length": 131072,
        **changes,
    }


@pytest.fixture(scope="module")
def fast_folder(tmp_path_factory):
    """tokenizer.json, with truncation and a BOS-adding post-processor such as published files may carry."""
    folder = tmp_path_factory.mktemp("fast")
    core = trained_core()
    state = json.loads(core.to_str())
    state["added_tokens"] = [
        {"id": i, "content": token, "special": token != PLAIN, "single_word": False, "lstrip": False}
        | {"rstrip": False, "normalized": False}
        for token, i in ADDED.items()
    ]
    # The holes need entries of the model's own, or the library would close ranks.
    state["model"]["vocab"] |= ADDED
    core = tokenizers.Tokenizer.from_str(json.dumps(state))
    core.enable_truncation(5)
    core.enable_padding(length=7)
    core.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 410)])
    core.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|bos|>", "mask_token": "<|mask|>"}))
    return folder


@pytest.fixture(scope="module")
def slow_folder(tmp_path_factory):
    """The same tokenizer in Dream's files, with remote code lying beside it that must not run."""
    folder = tmp_path_factory.mktemp("slow")
    trained_core().model.save(str(folder))
    (folder / "tokenizer_config.json").write_text(json.dumps(dream_settings()))
    (folder / "tokenization_remote.py").write_text(f"open({str(folder / 'remote_code_ran')!r}, 'w')\n")
    return folder


@pytest.fixture(scope="module")
def fast(fast_folder):
    return Tokenizer.from_folder(fast_folder, config())


@pytest.fixture(scope="module")
def slow(slow_folder):
    return Tokenizer.from_folder(slow_folder, config())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_meta(folder)
    return Tokenizer.from_folder(folder, ascii_config())


def write_meta(folder, **changes):
    meta = {"vocab": ASCII_VOCAB, "eos_id": 128, "mask_id": 129, "eot_id": 131, "shift_logits": False, **changes}
    (folder / "meta.json").write_text(json.dumps(meta))


def copy(folder, to, **replaced):
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    for name, text in replaced.items():
        (to / f"{name}.json").write_text(text if isinstance(text, str) else json.dumps(text))
    return to


@pytest.mark.parametrize("text", [*TEXTS, "<|im_start|>user\nHi<|im_end|><|mask|><tool_call>x"])
def test_both_file_formats_encode_alike(fast, slow, text):
    assert slow.encode(text) == fast.encode(text)


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_a_round_trip(slow, text):
    import unicodedata

    assert slow.decode(slow.encode(text)) == unicodedata.normalize("NFC", text)


def test_digits_are_split_one_by_one(slow):
    assert [slow.decode([i]) for i in slow.encode("a1234 56")] == ["a", "1", "2", "3", "4", " ", "5", "6"]


def test_words_are_merged(slow):
    assert len(slow.encode("Diffusion language models write all words at once")) < 25


def test_special_tokens_are_found_in_text_and_skipped_when_decoding(slow):
    ids = slow.encode("Hi<|im_end|><tool_call>")
    assert ids[-2:] == [402, 403]
    assert slow.decode(ids) == "Hi<tool_call>"
    assert slow.decode(ids, skip_special=False) == "Hi<|im_end|><tool_call>"
    assert slow.special_tokens == {token: i for token, i in ADDED.items() if token != PLAIN}


def test_bos_is_added_only_when_asked(fast, slow, tiny):
    for tokenizer in (fast, slow):
        assert tokenizer.bos_id == 410
        assert tokenizer.encode("Hi", add_special=True) == [410, *tokenizer.encode("Hi")]
        assert 410 not in tokenizer.encode("Hi")
    assert tiny.bos_id is None
    assert tiny.encode("Hi", add_special=True) == [72, 105]


def test_truncation_and_padding_of_the_file_are_ignored(fast):
    assert len(fast.encode("one two three four five six seven eight")) > 7
    assert len(fast.encode("a")) == 1


def test_remote_code_is_not_run(slow, slow_folder):
    assert not (slow_folder / "remote_code_ran").exists()


def test_bos_falls_back_to_the_config(slow_folder, tmp_path):
    settings = dream_settings()
    del settings["bos_token"]
    folder = copy(slow_folder, tmp_path, tokenizer_config=settings)
    assert Tokenizer.from_folder(folder, config()).bos_id == 410
    assert Tokenizer.from_folder(folder, config(bos_id=None)).bos_id is None


def test_added_tokens_of_older_files(slow, slow_folder, tmp_path):
    settings = {"bos_token": "<|bos|>", "eos_token": "<|endoftext|>"}
    extra = ["<|im_start|>", {"content": "<|im_end|>"}]
    named = {"mask_token": {"content": "<|mask|>"}, "additional_special_tokens": extra}
    folder = copy(slow_folder, tmp_path, tokenizer_config=settings, added_tokens=ADDED, special_tokens_map=named)
    older = Tokenizer.from_folder(folder, config())
    text = "Hi<|im_start|><|mask|><tool_call> 12"
    assert older.encode(text) == slow.encode(text)
    assert older.special_tokens == slow.special_tokens


def test_added_tokens_missing_from_tokenizer_json_are_taken_from_its_config(fast_folder, tmp_path):
    entry = {"content": "<|new|>", "special": True}
    folder = copy(fast_folder, tmp_path, tokenizer_config={"added_tokens_decoder": {"412": entry}})
    assert Tokenizer.from_folder(folder, config()).encode("<|new|>") == [412]
    folder = copy(fast_folder, tmp_path, tokenizer_config={"added_tokens_decoder": {"406": entry}})
    with pytest.raises(DllmError, match="disagree on the id of '<|new|>' .412 and 406.; copy all from one checkpoint"):
        Tokenizer.from_folder(folder, config())


def test_ascii_vocabulary(tiny):
    text = "".join(map(chr, range(128)))
    assert tiny.encode(text) == list(range(128))
    assert tiny.decode(range(128)) == text
    assert tiny.encode("a<|mask|><|eot_id|><|endoftext|>") == [97, 129, 131, 128]
    assert tiny.decode([97, 129, 130, 135, 98]) == "ab"  # 130 and 135 are defined by nobody
    with pytest.raises(DllmError, match="'caf\u00e9' cannot be expressed in this vocabulary"):
        tiny.encode("caf\u00e9")


@pytest.mark.parametrize("name", ["llada-tiny", "dream-tiny", "qwen2-tiny", "lladamoe-tiny"])
def test_tiny_checkpoints_of_this_repository(goldens, name):
    tokenizer = Tokenizer.from_folder(goldens / "checkpoints" / name, ascii_config())
    assert tokenizer.encode("Hi<|eot_id|>") == [72, 105, 131]
    assert tokenizer.special_tokens == {"<|endoftext|>": 128, "<|mask|>": 129, "<|eot_id|>": 131}


def test_ids_may_be_arrays(tiny):
    import jax.numpy as jnp
    import numpy as np

    assert tiny.decode(np.array([72, 105])) == tiny.decode(jnp.array([72, 105])) == tiny.decode((72, 105)) == "Hi"


@pytest.mark.parametrize("ids", [[-1], [136], [97, 10**12]])
def test_ids_outside_the_vocabulary_are_refused(tiny, ids):
    with pytest.raises(DllmError, match="is no token id of this vocabulary"):
        tiny.decode(ids)


def test_several_rows_are_refused(tiny):
    import numpy as np

    with pytest.raises(DllmError, match="decode one row of ids"):
        tiny.decode(np.zeros((2, 3), int))


@pytest.mark.parametrize("text", [None, ["a"], b"a"])
def test_only_strings_are_encoded(tiny, text):
    with pytest.raises(DllmError, match="only strings can be encoded"):
        tiny.encode(text)


@pytest.mark.parametrize("which", ["fast", "slow", "tiny"])
def test_token_bytes_join_to_the_decoded_text(which, request):
    tokenizer = request.getfixturevalue(which)
    pieces = tokenizer.token_bytes()
    assert len(pieces) == tokenizer.vocab_size
    for seed in range(300):  # random ids break characters in every possible way
        ids = random.Random(seed).choices(range(tokenizer.vocab_size), k=12)
        assert b"".join(pieces[i] for i in ids).decode("utf-8", "replace") == tokenizer.decode(ids)


def test_characters_that_are_split_across_tokens(slow):
    ids, pieces = slow.encode("🧪é"), slow.token_bytes()
    assert len(ids) > 2  # neither was seen in training
    assert b"".join(pieces[i] for i in ids) == "🧪é".encode()
    assert slow.decode(ids[:1]) == "\ufffd"


def test_token_bytes_of_special_and_undefined_ids_are_empty(slow):
    pieces = slow.token_bytes()
    assert [pieces[i] for i in (400, 403, 405, 411, 415)] == [b"", b"<tool_call>", b"", b"", b""]


def test_token_strings_are_readable(slow):
    strings = slow.token_strings()
    assert strings[411] == "<|mask|>"
    assert strings[slow.encode(" 1")[0]] == " "
    assert strings[slow.encode("🧪")[0]] == "\\xf0\\x9f"


def test_bytes_of_other_decoders_are_refused(tmp_path):
    core = tokenizers.Tokenizer(models.WordLevel({"a": 0}))
    core.decoder = decoders.Metaspace()
    tokenizer = Tokenizer(core, config())
    with pytest.raises(DllmError, match=r"not for \['Metaspace'\]"):
        tokenizer.token_bytes()


USER = {"role": "user", "content": "What is 2+2?"}
TURNS = [{"role": "system", "content": "Be brief."}, USER, {"role": "assistant", "content": "4"}]
AGAIN = {"role": "user", "content": "Why?"}


def llada_core():
    core = tokenizers.Tokenizer(models.WordLevel({chr(i): i for i in range(128)}, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    tokens = [
        "<|endoftext|>",
        "<|mdm_mask|>",
        "<|startoftext|>",
        "<|eot_id|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
    ]
    core.add_special_tokens([AddedToken(token, normalized=False) for token in tokens])
    return core


@pytest.fixture(scope="module")
def llada():
    return Tokenizer(llada_core(), ascii_config(bos_id=130))


def test_llada_single_turn(llada):
    text = (
        "<|startoftext|><|start_header_id|>user<|end_header_id|>\n\nWhat is 2+2?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert llada.apply_chat([USER]) == text
    assert llada.apply_chat([USER], add_generation_prompt=False) == text  # the published template never asks
    assert llada.apply_chat([{"role": "user", "content": "  What is 2+2?\n"}]) == text
    ids = llada.encode_chat([USER])
    assert ids == llada.encode(text)
    assert ids[:2] == [130, 132] and ids.count(130) == 1 and ids[-3:] == [133, 10, 10]


def test_llada_several_turns(llada):
    assert llada.apply_chat([*TURNS, AGAIN]) == (
        "<|startoftext|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nWhat is 2+2?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n4<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nWhy?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def test_dream_single_turn(slow):
    text = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nWhat is 2+2?<|im_end|>\n"
    assert slow.apply_chat([USER]) == text + "<|im_start|>assistant\n"
    assert slow.apply_chat([USER], add_generation_prompt=False) == text
    assert slow.encode_chat([USER])[0] == 401  # no BOS before a chat


def test_dream_several_turns(slow):
    assert slow.apply_chat([*TURNS, AGAIN]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 2+2?<|im_end|>\n"
        "<|im_start|>assistant\n4<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_qwen2_speaks_the_same_format_as_dream():
    assert chat.BUILT_IN["qwen2"] == chat.BUILT_IN["dream"]


def test_templates_of_the_folder_come_first(slow_folder, tmp_path):
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": "{{ bos_token }}{{ messages|length }}"}]
    folder = copy(slow_folder, tmp_path, tokenizer_config=dream_settings(chat_template=named))
    assert Tokenizer.from_folder(folder, config()).apply_chat(TURNS) == "<|bos|>3"
    settings = dream_settings(chat_template="{{ messages[0]['content'] | tojson }}{{ eos_token }}")
    folder = copy(slow_folder, tmp_path, tokenizer_config=settings)
    assert Tokenizer.from_folder(folder, config()).apply_chat(TURNS) == '"Be brief."<|endoftext|>'
    (folder / "chat_template.jinja").write_text("{% if add_generation_prompt %}\nGo{% endif %}\n")
    assert Tokenizer.from_folder(folder, config()).apply_chat(TURNS) == "Go"


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{% for %}", "the chat template failed .*Expected"),
        ("{{ raise_exception('Roles must alternate') }}", "failed \\(Roles must alternate\\)"),
        ("{{ messages[7]['role'] }}", "the chat template failed"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ ''.__class__.__mro__ }}", "the chat template failed .*unsafe"),
        ("{{ messages.append(1) }}", "the chat template failed"),
    ],
)
def test_failing_templates_give_a_sentence(template, sentence):
    with pytest.raises(DllmError, match=sentence):
        chat.render(template, [USER], tokens={})


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ([], "has no messages"),
        ("Hello", "a list of messages, not a str"),
        (USER, "a list of messages, not a dict"),
        (None, "a list of messages, not a NoneType"),
        (["Hello"], "message 0 is a str"),
        ([USER, {"content": "x"}], "message 1 has no role"),
        ([{"role": "robot", "content": "x"}], "message 0 has the unknown role 'robot'"),
        ([{"role": "user", "content": ["x"]}], "message 0 has list content"),
        ([{"role": "user"}], "message 0 has NoneType content"),
    ],
)
def test_bad_messages_are_refused(slow, messages, sentence):
    with pytest.raises(DllmError, match=sentence):
        slow.apply_chat(messages)


def test_a_family_without_template_is_refused(fast_folder):
    with pytest.raises(DllmError, match="no chat template is known for other models"):
        Tokenizer.from_folder(fast_folder, config("other")).apply_chat([USER])


DECODER = "added_tokens_decoder"


@pytest.mark.parametrize(
    ("replaced", "sentence"),
    [
        ({"tokenizer_config": "{"}, "tokenizer_config.json is not valid JSON"),
        ({"tokenizer_config": "[1]"}, "tokenizer_config.json holds no JSON object"),
        ({"tokenizer_config": {DECODER: [1]}}, "added_tokens_decoder is no JSON object"),
        ({"tokenizer_config": {DECODER: {"x": {"content": "<a>"}}}}, "no token id and text at 'x'"),
        ({"tokenizer_config": {DECODER: {"400": {"special": True}}}}, "no token id and text at '400'"),
        ({"tokenizer_config": {DECODER: {"5": {"content": "<a>"}}}}, "one id to two tokens"),
        ({"tokenizer_config": {DECODER: {"405": {"content": "a"}}}}, "disagree on the id of 'a'"),
        ({"tokenizer_config": {DECODER: {"400": {"content": "<a>"}, "500": {"content": "<b>"}}}}, "ids up to 500"),
        ({"tokenizer_config": dream_settings(mask_token="<|bos|>")}, "mask token is 410 but the model's is 411"),
        ({"tokenizer_config": dream_settings(chat_template=3)}, "chat_template is neither"),
        ({"added_tokens": {"<a>": "1"}}, "gives the token '<a>' the id '1'"),
        ({"added_tokens": '{"\\ud800": 412}'}, "gives the token .* the id 412; correct that entry"),
        ({"tokenizer_config": {DECODER: {"412": {"content": "\ud800"}}}}, "no token id and text at '412'"),
        ({"tokenizer_config": dream_settings(chat_template=[{"name": ["x"]}])}, "chat_template is neither"),
        ({"special_tokens_map": "nonsense"}, "special_tokens_map.json is not valid JSON"),
        ({"vocab": {"a": "b"}}, "does not give every token an id of its own"),
        ({"vocab": {"a": 1, "b": 1}}, "does not give every token an id of its own"),
        ({"vocab": {}}, "does not give every token an id of its own"),
        ({"vocab": {"a": 1}}, "do not fit"),
        ({"vocab": "{"}, "vocab.json is not valid JSON"),
    ],
)
def test_damaged_slow_files(slow_folder, tmp_path, replaced, sentence):
    with pytest.raises(DllmError, match=sentence):
        Tokenizer.from_folder(copy(slow_folder, tmp_path, **replaced), config())


def test_damaged_merges(slow_folder, tmp_path):
    folder = copy(slow_folder, tmp_path)
    (folder / "merges.txt").write_text("#version: 0.2\nĠ a b\n")
    with pytest.raises(DllmError, match="merges.txt line 2 is not a pair of tokens"):
        Tokenizer.from_folder(folder, config())
    (folder / "merges.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(DllmError, match="merges.txt could not be read"):
        Tokenizer.from_folder(folder, config())
    (folder / "merges.txt").unlink()
    with pytest.raises(DllmError, match="a vocab.json but no merges.txt"):
        Tokenizer.from_folder(folder, config())


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"model": {"type": "Other"}}', "\x00"])
def test_damaged_tokenizer_json(fast_folder, tmp_path, text):
    with pytest.raises(DllmError, match="tokenizer.json could not be read .*copy the file again"):
        Tokenizer.from_folder(copy(fast_folder, tmp_path, tokenizer=text), config())


def test_a_tokenizer_larger_than_the_model_is_refused(fast_folder):
    with pytest.raises(DllmError, match="knows ids up to 411 but the model has 408"):
        Tokenizer.from_folder(fast_folder, config(vocab_size=408, mask_id=None, bos_id=None))


@pytest.mark.parametrize("changes", [{"eos_id": 3}, {"mask_id": "129"}, {"eot_id": 128}, {"eos_id": True}])
def test_meta_with_wrong_ids(tmp_path, changes):
    write_meta(tmp_path, **changes)
    with pytest.raises(DllmError, match="must be different integers from 128 on"):
        Tokenizer.from_folder(tmp_path, ascii_config())


def test_folders_without_tokenizer(tmp_path):
    assert not has_tokenizer(tmp_path)
    (tmp_path / "meta.json").write_text('{"vocab": "something else"}')
    assert not has_tokenizer(tmp_path)
    with pytest.raises(DllmError, match="has no tokenizer; put tokenizer.json"):
        Tokenizer.from_folder(tmp_path, config())
    write_meta(tmp_path)
    assert has_tokenizer(tmp_path)
