"""Tokenizers of real file formats as transformers' own, chat texts as published, and the bytes of single tokens."""

import json
import random
import subprocess
import sys
import unicodedata

import numpy as np
import pytest
import tokenizers
import transformers
from conftest import refuses
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from dllm_jax.config import ModelConfig
from dllm_jax.text.tokenizer import (
    ASCII_VOCAB,
    chat_text,
    encode_chat,
    encode_text,
    has_tokenizer,
    least_tokens,
    load_tokenizer,
    special_tokens,
    token_bytes,
    token_strings,
    without_special_tokens,
)

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
        "eos_token": "<|endoftext|>",
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
    core.enable_padding(length=7, pad_id=400, pad_token="<|endoftext|>")
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
    return load_tokenizer(fast_folder, config())


@pytest.fixture(scope="module")
def slow(slow_folder):
    return load_tokenizer(slow_folder, config())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_meta(folder)
    return load_tokenizer(folder, ascii_config())


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
def test_both_file_formats_encode_alike(fast, slow, fast_folder, text):
    plain = tokenizers.Tokenizer.from_file(str(fast_folder / "tokenizer.json"))
    plain.no_truncation()
    plain.no_padding()
    assert encode_text(slow, text) == encode_text(fast, text) == plain.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_a_round_trip(slow, text):
    assert slow.decode(encode_text(slow, text)) == unicodedata.normalize("NFC", text)


@pytest.mark.parametrize("which", ["fast", "slow", "tiny"])
def test_they_are_transformers_own(which, request):
    tokenizer = request.getfixturevalue(which)
    assert isinstance(tokenizer, transformers.PreTrainedTokenizerBase)
    assert tokenizer("Hi", add_special_tokens=False)["input_ids"] == encode_text(tokenizer, "Hi")
    assert tokenizer.convert_ids_to_tokens(tokenizer.mask_token_id) == tokenizer.mask_token == "<|mask|>"
    rows = tokenizer(["a", "abc"], add_special_tokens=False, padding=True, return_tensors="np")["input_ids"]
    assert len(rows) == 2 and rows[0, -1] == tokenizer.pad_token_id == tokenizer.eos_token_id
    assert tokenizer.decode(np.array(encode_text(tokenizer, "Hi"))) == "Hi"


def test_special_tokens_are_found_in_text_and_skipped_when_decoding(slow):
    ids = encode_text(slow, "Hi<|im_end|><tool_call>")
    assert ids[-2:] == [402, 403]
    assert slow.decode(ids, skip_special_tokens=True) == "Hi<tool_call>"
    assert slow.decode(ids) == "Hi<|im_end|><tool_call>"
    assert special_tokens(slow) == {token: i for token, i in ADDED.items() if token != PLAIN}


def test_bos_truncation_and_padding_of_the_file_leave_prompts_alone(fast):
    assert fast.encode("Hi")[0] == 410 and 410 not in encode_text(fast, "Hi")
    assert len(encode_text(fast, "one two three four five six seven eight")) > 7
    assert len(encode_text(fast, "a")) == 1


def test_remote_code_is_not_run(slow, slow_folder):
    assert not (slow_folder / "remote_code_ran").exists()


def test_nothing_is_downloaded_or_printed(slow_folder, tmp_path):
    """Above 100,000 tokens transformers looks for Mistral's tokenizers; and it misses PyTorch when imported."""
    folder = copy(slow_folder, tmp_path)
    (folder / "config.json").write_text(config().to_json())
    vocab = json.loads((folder / "vocab.json").read_text())
    vocab |= {f"unused{i}": i for i in range(412, 100_500)}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    program = (
        "import socket, sys\n"
        "def refuse(*_): raise SystemExit('the network was asked')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "import dllm_jax\n"
        "from dllm_jax.text.tokenizer import encode_text, load_tokenizer\n"
        "assert 'transformers' not in sys.modules\n"
        "print(encode_text(load_tokenizer(sys.argv[1]), '<|mask|>' * 3))\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(folder)], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[411, 411, 411]\n", "")


def test_special_tokens_that_the_files_do_not_name_are_the_config_s(slow_folder, tmp_path):
    settings = {name: value for name, value in dream_settings().items() if name not in ("bos_token", "mask_token")}
    folder = copy(slow_folder, tmp_path, tokenizer_config=settings)
    tokenizer = load_tokenizer(folder, config())
    assert (tokenizer.bos_token, tokenizer.mask_token_id, tokenizer.pad_token_id) == ("<|bos|>", 411, 400)
    assert load_tokenizer(folder, config(bos_id=None)).bos_token is None


def test_added_tokens_of_older_files(slow, slow_folder, tmp_path):
    settings = {"bos_token": "<|bos|>", "eos_token": "<|endoftext|>"}
    named = {"mask_token": {"content": "<|mask|>"}, "cls_token": "<|im_start|>", "sep_token": "<|im_end|>"}
    folder = copy(slow_folder, tmp_path, tokenizer_config=settings, added_tokens=ADDED, special_tokens_map=named)
    older = load_tokenizer(folder, config())
    text = "Hi<|im_start|><|mask|><tool_call> 12"
    assert encode_text(older, text) == encode_text(slow, text)
    assert special_tokens(older) == special_tokens(slow)


def test_added_tokens_missing_from_tokenizer_json_are_taken_from_its_config(fast_folder, tmp_path):
    entry = {"content": "<|new|>", "special": True}
    folder = copy(fast_folder, tmp_path, tokenizer_config={"added_tokens_decoder": {"412": entry}})
    assert encode_text(load_tokenizer(folder, config()), "<|new|>") == [412]
    folder = copy(fast_folder, tmp_path, tokenizer_config={"added_tokens_decoder": {"406": entry}})
    with refuses("<|new|>", "412", "406"):
        load_tokenizer(folder, config())


def test_ascii_vocabulary(tiny):
    text = "".join(map(chr, range(128)))
    assert encode_text(tiny, text) == list(range(128))
    assert tiny.decode(list(range(128))) == text
    assert encode_text(tiny, "a<|mask|><|eot_id|><|endoftext|>") == [97, 129, 131, 128]
    assert tiny.decode([97, 129, 130, 135, 98], skip_special_tokens=True) == "ab"  # nobody defines 130 and 135
    with refuses("caf\u00e9"):
        encode_text(tiny, "caf\u00e9")


@pytest.mark.parametrize("name", ["llada-tiny", "dream-tiny", "qwen2-tiny", "lladamoe-tiny"])
def test_tiny_checkpoints_of_this_repository(goldens, name):
    tokenizer = load_tokenizer(goldens / "checkpoints" / name, ascii_config())
    assert encode_text(tokenizer, "Hi<|eot_id|>") == [72, 105, 131]
    assert special_tokens(tokenizer) == {"<|endoftext|>": 128, "<|mask|>": 129, "<|eot_id|>": 131}


@pytest.mark.parametrize(("text", "name"), [(None, "NoneType"), (["a"], "list"), (b"a", "bytes"), ("\ud800", "ud800")])
def test_only_texts_of_whole_characters_are_encoded(slow, text, name):
    with refuses(name):
        encode_text(slow, text)


@pytest.mark.parametrize("which", ["fast", "slow", "tiny"])
def test_token_bytes_join_to_the_decoded_text(which, request):
    tokenizer, size = request.getfixturevalue(which), 136 if which == "tiny" else 416
    pieces = token_bytes(tokenizer, size)
    assert len(pieces) == size
    for seed in range(300):  # random ids break characters in every possible way
        ids = random.Random(seed).choices(range(size), k=12)
        joined = b"".join(pieces[i] for i in ids).decode("utf-8", "replace")
        assert joined == tokenizer.decode(ids, skip_special_tokens=True)


def test_characters_that_are_split_across_tokens(slow):
    ids, pieces = encode_text(slow, "🧪é"), token_bytes(slow, 416)
    assert len(ids) > 2  # neither occurred in training
    assert b"".join(pieces[i] for i in ids) == "🧪é".encode()
    assert slow.decode(ids[:1]) == "\ufffd"


def test_token_bytes_of_special_and_undefined_ids_are_empty(slow):
    pieces = token_bytes(slow, 416)
    assert [pieces[i] for i in (400, 403, 405, 411, 415)] == [b"", b"<tool_call>", b"", b"", b""]


def test_token_strings_are_readable(slow):
    strings = token_strings(slow, 416)
    assert strings[411] == "<|mask|>"
    assert strings[encode_text(slow, " 1")[0]] == " "
    assert strings[encode_text(slow, "🧪")[0]] == "\\xf0\\x9f"


def test_bytes_of_other_decoders_are_refused():
    core = tokenizers.Tokenizer(models.WordLevel({"a": 0}))
    core.decoder = decoders.Metaspace()
    with refuses("Metaspace"):
        token_bytes(transformers.PreTrainedTokenizerFast(tokenizer_object=core), 1)


USER = {"role": "user", "content": "What is 2+2?"}
TURNS = [{"role": "system", "content": "Be brief."}, USER, {"role": "assistant", "content": "4"}]
AGAIN = {"role": "user", "content": "Why?"}


def render(tokenizer, messages):
    return tokenizer.decode(encode_chat(tokenizer, messages))


@pytest.fixture(scope="module")
def llada(tmp_path_factory):
    """LLaDA's special tokens behind ASCII, and no chat template."""
    folder = tmp_path_factory.mktemp("llada")
    core = tokenizers.Tokenizer(models.WordLevel({chr(i): i for i in range(128)}, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    names = ["<|endoftext|>", "<|mdm_mask|>", "<|startoftext|>", "<|eot_id|>"]
    names += ["<|start_header_id|>", "<|end_header_id|>"]
    core.add_special_tokens([AddedToken(token, normalized=False) for token in names])
    core.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder, ascii_config(bos_id=130))


def test_llada_single_turn(llada):
    text = (
        "<|startoftext|><|start_header_id|>user<|end_header_id|>\n\nWhat is 2+2?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert render(llada, [USER]) == text
    assert llada.apply_chat_template([USER], tokenize=False) == text  # the published template never asks
    assert render(llada, [{"role": "user", "content": "  What is 2+2?\n"}]) == text
    ids = encode_chat(llada, [USER])
    assert ids[:2] == [130, 132] and ids.count(130) == 1 and ids[-3:] == [133, 10, 10]


def test_llada_several_turns(llada):
    assert render(llada, [*TURNS, AGAIN]) == (
        "<|startoftext|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nWhat is 2+2?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n4<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nWhy?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def test_llada_without_a_bos_token(tiny):
    assert render(tiny, [USER]).startswith("<|start_header_id|>user<|end_header_id|>")


def test_dream_single_turn(slow):
    text = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nWhat is 2+2?<|im_end|>\n"
    assert render(slow, [USER]) == text + "<|im_start|>assistant\n"
    assert slow.apply_chat_template([USER], tokenize=False) == text
    assert encode_chat(slow, [USER])[0] == 401  # no BOS before a chat
    assert slow.apply_chat_template([USER], add_generation_prompt=True, return_dict=False) == encode_chat(slow, [USER])


def test_dream_several_turns(slow):
    assert render(slow, [*TURNS, AGAIN]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 2+2?<|im_end|>\n"
        "<|im_start|>assistant\n4<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_templates_of_the_folder_come_first(slow_folder, tmp_path):
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": "{{ bos_token }}{{ messages|length }}"}]
    folder = copy(slow_folder, tmp_path, tokenizer_config=dream_settings(chat_template=named))
    assert render(load_tokenizer(folder, config()), TURNS) == "<|bos|>3"
    settings = dream_settings(chat_template="{{ messages[0]['content'] | tojson }}{{ eos_token }}")
    folder = copy(slow_folder, tmp_path, tokenizer_config=settings)
    assert render(load_tokenizer(folder, config()), TURNS) == '"Be brief."<|endoftext|>'
    (folder / "chat_template.jinja").write_text("{% if add_generation_prompt %}\nGo{% endif %}\n")
    assert render(load_tokenizer(folder, config()), TURNS) == "Go"


@pytest.mark.parametrize(
    "template",
    [
        "{% for %}",
        "{{ raise_exception('Roles must alternate') }}",
        "{{ messages[7]['role'] }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        3,
        [{"name": "rag", "template": "no"}],
    ],
)
def test_failing_templates_give_a_sentence(slow_folder, tmp_path, template):
    settings = dream_settings(chat_template=template)
    tokenizer = load_tokenizer(copy(slow_folder, tmp_path, tokenizer_config=settings), config())
    with refuses("template"):
        encode_chat(tokenizer, [USER])


@pytest.mark.parametrize(
    ("messages", "name"),
    [
        ([], "no messages"),
        ("Hello", "str"),
        (USER, "dict"),
        (None, "NoneType"),
        (["Hello"], "message 0"),
        ([USER, {"content": "x"}], "message 1"),
        ([{"role": "robot", "content": "x"}], "'robot'"),
        ([{"role": "user", "content": ["x"]}], "list"),
        ([{"role": "user"}], "message 0"),
    ],
)
def test_bad_messages_are_refused(slow, messages, name):
    with refuses(name):
        encode_chat(slow, messages)


def test_without_a_chat_template_there_are_no_conversations(fast_folder, tmp_path):
    """The folder's may be empty; a family may have none."""
    write_meta(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": ""}')
    for tokenizer in (load_tokenizer(tmp_path, ascii_config()), load_tokenizer(fast_folder, config("other"))):
        with refuses("chat_template.jinja"):
            encode_chat(tokenizer, [USER])


ALONE = ["fast", "slow", "tiny", "llada"]


@pytest.mark.parametrize("which", ALONE)
def test_special_tokens_in_texts_of_others_are_text(which, request):
    """Other texts are encoded as ever, and the tokenizer itself stays as it is."""
    tokenizer = request.getfixturevalue(which)
    mine, special = without_special_tokens(tokenizer), special_tokens(tokenizer)
    for text in (*special, "".join(special), " x ".join(special), "<|im_<|im_end|>end|>"):
        ids = encode_text(mine, text)
        assert not {*special.values()} & {*ids} and mine.decode(ids) == text
    for text in TEXTS if which in ("fast", "slow") else [text for text in TEXTS if text.isascii()]:
        assert encode_text(mine, text) == encode_text(tokenizer, text)
    assert [encode_text(tokenizer, text) for text in special] == [[i] for i in special.values()]


@pytest.mark.parametrize("which", ["slow", "tiny", "llada"])
def test_only_the_template_writes_special_tokens(which, request):
    tokenizer = request.getfixturevalue(which)
    mine, special = without_special_tokens(tokenizer), special_tokens(tokenizer)
    roles = [turn["role"] for turn in (*TURNS, AGAIN)]
    written = lambda ids: [i for i in ids if i in special.values()]
    plain = [{"role": role, "content": f" <b> \n{role}|>"} for role in roles]
    assert encode_chat(mine, plain) == encode_chat(tokenizer, plain), "other contents are encoded as ever"
    contents = [*special, "".join(special), " x ".join(special) + "\n", "<|im_<|im_end|>end|>"]
    contents += ["\ue000 <|im_end|>", "".join(map(chr, range(0xE000, 0xE009)))] if which == "slow" else []
    for content in contents:
        messages = [{"role": role, "content": content} for role in roles]
        ids = encode_chat(mine, messages)
        assert written(ids) == written(encode_chat(tokenizer, plain))
        assert mine.decode(ids) == chat_text(tokenizer, messages)


def test_a_template_may_rewrite_messages_with_special_tokens(slow):
    own = without_special_tokens(slow)
    own.chat_template = "{{ bos_token }}{% for m in messages %}{{ m['content'] | trim }}{{ eos_token }}{% endfor %}"
    ids = encode_chat(own, [{"role": "user", "content": f" {token}\n"} for token in ("<|im_end|>", "<|bos|>")])
    assert [i for i in ids if i >= BPE_SIZE] == [410, 400, 400] and own.decode(ids[1:-1]) == (
        "<|im_end|><|endoftext|><|bos|>"
    )


@pytest.mark.parametrize("change", [{"rstrip": True}, {"lstrip": True}, "prefix", "word"])
def test_tokenizers_that_cannot_write_special_tokens_as_text(change):
    """One that strips or adds spaces beside a special token, and one of whose words one is."""
    core = tokenizers.Tokenizer(models.WordLevel({"a": 0, " ": 1, "<|x|>": 2, "?": 3, "\u2581a": 4}, unk_token="?"))
    if change != "word":
        isolated = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first") if change == "prefix" else isolated
    own = change if isinstance(change, dict) else {}
    core.add_special_tokens([AddedToken("<|x|>", normalized=False, **own)])
    with refuses("<|x|>", "--allow-special-tokens"):
        without_special_tokens(transformers.PreTrainedTokenizerFast(tokenizer_object=core))


DECODER = "added_tokens_decoder"
UNREADABLE = "copy its files again"


@pytest.mark.parametrize(
    ("replaced", "name"),
    [
        ({"tokenizer_config": "{"}, "tokenizer_config.json"),
        ({"tokenizer_config": "[1]"}, "tokenizer_config.json"),
        ({"tokenizer_config": {DECODER: [1]}}, UNREADABLE),
        ({"tokenizer_config": {DECODER: {"x": {"content": "<a>"}}}}, UNREADABLE),
        ({"tokenizer_config": {DECODER: {"400": {"special": True}}}}, UNREADABLE),
        ({"tokenizer_config": {DECODER: {"5": {"content": "<a>"}}}}, UNREADABLE),
        ({"tokenizer_config": {DECODER: {"405": {"content": "a"}}}}, "'a'"),
        ({"tokenizer_config": {DECODER: {"400": {"content": "<a>"}, "500": {"content": "<b>"}}}}, "500"),
        ({"tokenizer_config": dream_settings(mask_token="<|bos|>")}, "mask token is 410"),
        ({"added_tokens": {"<a>": "1"}}, UNREADABLE),
        ({"added_tokens": '{"\\ud800": 412}'}, UNREADABLE),
        ({"tokenizer_config": {DECODER: {"412": {"content": "\ud800"}}}}, UNREADABLE),
        ({"special_tokens_map": "nonsense", "tokenizer_config": {}}, UNREADABLE),
        ({"vocab": {"a": "b"}}, UNREADABLE),
        ({"vocab": {"a": 1, "b": 1}}, UNREADABLE),
        ({"vocab": {}}, UNREADABLE),
        ({"vocab": {"a": 1}}, UNREADABLE),
        ({"vocab": "{"}, UNREADABLE),
    ],
)
def test_damaged_slow_files(slow_folder, tmp_path, replaced, name):
    with refuses(name):
        load_tokenizer(copy(slow_folder, tmp_path, **replaced), config())


@pytest.mark.parametrize("merges", [b"#version: 0.2\n\xc4\xa0 a b\n", b"\xff\xfe", None])
def test_damaged_merges(slow_folder, tmp_path, merges):
    folder = copy(slow_folder, tmp_path)
    (folder / "merges.txt").unlink()
    if merges is not None:
        (folder / "merges.txt").write_bytes(merges)
    with refuses("merges.txt" if merges is None else UNREADABLE):
        load_tokenizer(folder, config())


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"model": {"type": "Other"}}', "\x00"])
def test_damaged_tokenizer_json(fast_folder, tmp_path, text):
    with refuses(UNREADABLE):
        load_tokenizer(copy(fast_folder, tmp_path, tokenizer=text), config())


def test_a_tokenizer_larger_than_the_model_is_refused(fast_folder):
    with refuses("411", "408"):
        load_tokenizer(fast_folder, config(vocab_size=408, mask_id=None, bos_id=None))


@pytest.mark.parametrize("changes", [{"eos_id": 3}, {"mask_id": "129"}, {"eot_id": 128}, {"eos_id": True}])
def test_meta_with_wrong_ids(tmp_path, changes):
    write_meta(tmp_path, **changes)
    with refuses("meta.json"):
        load_tokenizer(tmp_path, ascii_config())


def test_folders_without_tokenizer(tmp_path):
    assert not has_tokenizer(tmp_path)
    (tmp_path / "meta.json").write_text('{"vocab": "something else"}')
    assert not has_tokenizer(tmp_path)
    with refuses("tokenizer.json"):
        load_tokenizer(tmp_path, config())
    write_meta(tmp_path)
    assert has_tokenizer(tmp_path)


@pytest.mark.parametrize("which", ["fast", "slow", "tiny"])
def test_the_least_number_of_tokens_is_no_more_than_there_are(which, request):
    tokenizer = request.getfixturevalue(which)
    found = [text for text in TEXTS if which != "tiny" or text.isascii()]
    found += [] if which == "tiny" else ["\u03b9\u0308\u0301" * 50, "e\u0301" * 50]  # NFC makes these shorter
    for text in [*found, *tokenizer.get_vocab()]:
        assert least_tokens(tokenizer, text) <= len(encode_text(tokenizer, text))
    longest = max(map(len, token_bytes(tokenizer, 136 if which == "tiny" else 416)))
    longest = max(longest, *map(len, special_tokens(tokenizer)))
    assert least_tokens(tokenizer, "x" * 10**6) == -(-(10**6) // longest)


@pytest.mark.parametrize("loses", ["unknown words", "spaces", "spaces beside a token", "what is replaced"])
def test_no_least_number_of_tokens_where_a_text_may_be_lost(loses):
    core = trained_core()
    if loses == "unknown words":
        core = tokenizers.Tokenizer(models.WordLevel({"?": 0, "x": 1}, unk_token="?"))
    elif loses == "spaces":
        core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), core.pre_tokenizer])
    elif loses == "spaces beside a token":
        core.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    else:
        core.normalizer = normalizers.Replace("xxx", "x")
    assert least_tokens(transformers.PreTrainedTokenizerFast(tokenizer_object=core), "x" * 10**6) == 0
