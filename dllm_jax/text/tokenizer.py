"""Tokenizers of `transformers` from the files of a checkpoint folder; nothing is downloaded and none of its code runs.

Three kinds of files are read; the first that exists is used:

* `tokenizer.json`, the format of the `tokenizers` library (LLaDA, Qwen2.5).
* `vocab.json` and `merges.txt` (Dream): transformers' Qwen2 tokenizer, even if the folder names another class.
* `meta.json` with `"vocab": "token ids 0-127 are ASCII bytes"`, the tiny test checkpoints. The ids under `eos_id`,
  `mask_id` and `eot_id` become `<|endoftext|>`, `<|mask|>` and `<|eot_id|>`; the other ids are unused.

`tokenizer_config.json` and its older companions name the special tokens. A chat template of the folder takes precedence
over the family's built-in one.
"""

import contextlib
import copy
import functools
import inspect
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from dllm_jax.config import ModelConfig
from dllm_jax.errors import DllmError
from dllm_jax.families import FAMILIES
from dllm_jax.storage import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILES = (
    "tokenizer.json",
    "vocab.json",
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "meta.json",
)
"""Files that are read from a folder; converters copy those that exist."""

ROLES = ("system", "user", "assistant", "tool")
ASCII_VOCAB = "token ids 0-127 are ASCII bytes"
_ASCII_TOKENS = {"eos_id": "<|endoftext|>", "mask_id": "<|mask|>", "eot_id": "<|eot_id|>"}


def load_tokenizer(folder: str | Path, config: ModelConfig | None = None) -> "PreTrainedTokenizerBase":
    """The tokenizer of a checkpoint folder from its local files; see the module's text for which.

    Args:
        config: the model's; gives the chat template of its family and special ids that the files lack.

    Raises:
        DllmError: for a folder without tokenizer files, for files that are damaged or contradict each other, and for a
            tokenizer that does not fit the model: ids outside its vocabulary, another mask token.
    """
    folder = Path(folder)
    try:
        with quiet_transformers():
            tokenizer = _from_files(folder)
        _check_ids(tokenizer, _added_tokens(folder))
    except DllmError:
        raise
    except Exception as error:  # the libraries raise any type, also the plain Exception
        raise DllmError(
            f"the tokenizer of {folder} could not be read ({_reason(error)}); copy its files again"
        ) from None
    tokenizer.clean_up_tokenization_spaces = False  # else a decoded text is not the joined `token_bytes`
    if config is not None:
        _fit(tokenizer, config, folder)
    return tokenizer


def has_tokenizer(folder: str | Path) -> bool:
    """Whether a folder has the files that `load_tokenizer` needs."""
    folder = Path(folder)
    if any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json")):
        return True
    return read_json(folder / "meta.json").get("vocab") == ASCII_VOCAB


def encode_text(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """Token ids of a text, without a BOS; special tokens written in it become their ids, unless the tokenizer is one of
    `without_special_tokens`.

    Raises:
        DllmError: for anything but a string, and for characters outside the vocabulary.
    """
    if not isinstance(text, str):
        raise DllmError(f"only strings can be encoded, not a {type(text).__name__}; encode the texts one by one")
    try:
        return tokenizer.encode(text, add_special_tokens=False, verbose=False)
    except Exception as error:  # the library raises plain Exception, also for lone surrogates
        raise DllmError(f"{text[:40]!r} cannot be expressed in this vocabulary ({_reason(error)})") from None


def least_tokens(tokenizer: "PreTrainedTokenizerBase", text: str) -> int:
    """A lower bound on the number of tokens of a text, without encoding it: its bytes over the longest token's.

    Encoding may take seconds, and takes 200 bytes of memory per byte of text, so limits are checked by this bound
    first. It is 0 where the tokenizer may drop or replace parts of a text.
    """
    longest = _longest_token(tokenizer)
    if longest is None:
        return 0
    size = len(text.encode("utf-8", "surrogatepass"))
    shrinks = 1 if text.isascii() else _NFC_SHRINKS
    return -(-size // (longest * shrinks))


_NFC_SHRINKS = 3  # bytes before composition over bytes after it, at most: U+03B9 U+0308 U+0301 is U+0390


@functools.lru_cache(maxsize=4)
def _longest_token(tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """Bytes of the longest token; None if a byte of a text may be in none of its tokens."""
    core = tokenizer.backend_tokenizer
    changes, splits = _steps_of(core.normalizer, "normalizers"), _steps_of(core.pre_tokenizer, "pretokenizers")
    vocab = tokenizer.get_vocab()
    by_byte = any(split["type"] == "ByteLevel" for split in splits)
    covered = vocab.keys() >= (_byte_alphabet().keys() if by_byte else {f"<0x{byte:02X}>" for byte in range(256)})
    refuses = isinstance(core.model, models.WordLevel) and core.model.unk_token not in vocab  # and replaces nothing
    complete = (isinstance(core.model, models.BPE) and covered and (by_byte or core.model.byte_fallback)) or refuses
    strips = any(token.lstrip or token.rstrip for token in tokenizer.added_tokens_decoder.values())
    if not complete or strips or not all(map(_keeps_bytes, changes)) or not all(map(_keeps_text, splits)):
        return None
    added = {token.content for token in tokenizer.added_tokens_decoder.values()}
    size = lambda token: len(token if by_byte and token not in added else token.encode())
    return max(map(size, vocab), default=None)


def _steps_of(part: Any, name: str) -> list[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, in order."""
    if part is None:
        return []
    state = json.loads(part.__getstate__())
    return list(state.get(name, [state]))


def _keeps_bytes(change: Mapping[str, Any]) -> bool:
    """Whether a step of a normalizer never shortens a text, except by NFC's composition."""
    if change["type"] == "Replace":
        pattern = change["pattern"].get("String")
        return pattern is not None and len(change["content"].encode()) >= len(pattern.encode())
    return change["type"] in ("NFC", "NFD", "Prepend")


def _keeps_text(split: Mapping[str, Any]) -> bool:
    """Whether a step of a pre-tokenizer keeps all of the text."""
    if split["type"] == "Split":
        return bool(split["behavior"] != "Removed")
    return split["type"] in ("ByteLevel", "Digits", "Metaspace")


def encode_texts(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str]) -> list[list[int]]:
    """`encode_text` of each text, on all cores; raises its error for the first text that cannot be encoded."""
    if not texts:
        return []
    try:
        encoded = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)
    except Exception:  # encoded one by one, the text at fault is named
        return [encode_text(tokenizer, text) for text in texts]
    return cast(list[list[int]], encoded["input_ids"])


def without_special_tokens(tokenizer: "PreTrainedTokenizerBase") -> "PreTrainedTokenizerBase":
    """A copy for texts of others, in which special tokens are text like any other: `encode_text` gives no special id,
    and `chat_pieces` those alone that the template writes.

    Raises:
        DllmError: for a tokenizer that cannot do that, or encodes a text in another way beside a special token.
    """
    found = copy.deepcopy(tokenizer)
    found.split_special_tokens = True
    special = special_tokens(found)
    for token, i in special.items():
        with contextlib.suppress(DllmError):  # a small vocabulary may lack the characters, and refuses them later
            wanted = [i, *encode_text(found, " a "), i, *encode_text(found, "a")]
            whole = encode_text(tokenizer, f"{token} a {token}a")
            if whole != wanted or set(special.values()) & {*encode_text(found, token)}:
                break
    else:
        return found
    raise DllmError(f"the tokenizer cannot write {token} as plain text; serve it with --allow-special-tokens")


def chat_pieces(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Mapping[str, Any]],
    template: Mapping[str, Any] | None = None,
) -> list[str | int]:
    """A conversation as `chat_text` writes it, in pieces for `encode_pieces`; arguments and errors as of that.

    One piece as a rule. With a tokenizer of `without_special_tokens` the template's special tokens are pieces of their
    own, as ids, and those that messages hold stay text.
    """
    if not tokenizer.split_special_tokens:
        return [chat_text(tokenizer, messages, template)]
    check_messages(messages)
    special = special_tokens(tokenizer)
    pattern, texts = _any_of(special), set[str]()

    def seen(text: str) -> str:
        texts.update(text)
        return text

    try:
        _mapped(seen, [*messages, template])
    except RecursionError:
        raise DllmError("the conversation has values nested too deeply; flatten them") from None
    # A character that nothing holds, behind every one of a special token in a message, tells it from the template's.
    mark = next((char for char in map(chr, range(0xE000, 0xF900)) if char not in texts), "\ue000")
    marked = lambda text: re.sub(pattern, lambda match: "".join(char + mark for char in match[0]), text)
    turns, template = _mapped(marked, [*messages]), _mapped(marked, template)
    pieces = re.split(f"({pattern})(?!{mark})", chat_text(tokenizer, turns, template))
    return [special[piece] if place % 2 else piece.replace(mark, "") for place, piece in enumerate(pieces)]


def _mapped(change: Callable[[str], str], value: Any) -> Any:
    """Plain values with their texts changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(name): _mapped(change, own) for name, own in value.items()}
    return [_mapped(change, own) for own in value] if isinstance(value, list | tuple) else value


def encode_pieces(tokenizer: "PreTrainedTokenizerBase", pieces: Sequence[str | int]) -> list[int]:
    """Token ids of texts and of single tokens, one after another; errors as of `encode_text`."""
    encoded = ([piece] if isinstance(piece, int) else encode_text(tokenizer, piece) for piece in pieces)
    return [token for ids in encoded for token in ids]


def encode_chat(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Token ids of a conversation as a prompt for the assistant's answer; arguments and errors as of `chat_text`."""
    return encode_pieces(tokenizer, chat_pieces(tokenizer, messages))


def chat_text(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Mapping[str, Any]],
    template: Mapping[str, Any] | None = None,
    *,
    continued: bool = False,
) -> str:
    """A conversation in the model's chat format, its start token included: text for `encode_text`.

    Args:
        messages: `[{"role": "user", "content": "..."}, ...]`; roles are system, user, assistant and tool.
        template: what else the chat template takes, such as tools and enable_thinking.
        continued: the last message, the assistant's, is the beginning of its answer, and the text ends right after it.
            Otherwise the text ends with the opening of the assistant's turn.

    Raises:
        DllmError: for messages of another shape, a tokenizer without chat template, and a template that fails or takes
            none of that.
    """
    check_messages(messages)
    turns = [dict(message) for message in messages]
    if continued:
        if turns[-1]["role"] != "assistant":
            raise DllmError(f"the last message is the {turns[-1]['role']}'s; only one of the assistant is continued")
        turns[-1]["content"] += _CUT
    text = _render(tokenizer, turns, template or {}, opened=not continued)
    if not continued:
        return text
    before, found, _ = text.partition(_CUT)  # templates end the turn after it, and may open another
    if not found:
        raise DllmError("the chat template leaves out the assistant's message, so that it cannot be continued")
    return before


class Turn(NamedTuple):
    """A message of the assistant in the model's chat format.

    Attributes:
        given: the text between the assistant's previous message and this one; for the first all before it.
        message: the assistant's text.
        end: the end of its turn, such as "<|eot_id|>"; "" with a template that ends turns without a special token.
        end_id: the token that `end` ends with.
    """

    given: str
    message: str
    end: str
    end_id: int | None


def chat_turns(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Mapping[str, Any]]) -> list[Turn]:
    """A conversation that ends with the assistant's message, cut at what the assistant writes; joined the turns are the
    conversation as the template writes it, up to the end of the last.

    A turn's end is what the template writes after the last message, through the first of the tokenizer's added tokens.

    Raises:
        DllmError: as `chat_text`, for a last message of another, and for a template that rewrites messages.
    """
    check_messages(messages)
    if messages[-1]["role"] != "assistant":
        raise DllmError(f"the last message is the {messages[-1]['role']}'s; end with one of the assistant")
    marked = [dict(message) for message in messages]
    own = [message for message in marked if message["role"] == "assistant"]
    for message in own:
        message["content"] = f"{_CUT}{message['content']}{_CUT}"
    given, *rest = _render(tokenizer, marked, {}, opened=False).split(_CUT)
    if len(rest) != 2 * len(own):
        raise DllmError("the chat template leaves out or rewrites messages of the assistant, which cannot be learned")
    added = tokenizer.get_added_vocab()
    found = re.search(_any_of(added), rest[-1])
    end, end_id = (rest[-1][: found.end()], added[found.group()]) if found else ("", None)
    turns = []
    for content, after in zip(rest[::2], rest[1::2], strict=True):
        turns.append(Turn(given, content, end, end_id) if after.startswith(end) else Turn(given, content, "", None))
        given = after.removeprefix(end)
    return turns


def _render(
    tokenizer: "PreTrainedTokenizerBase", turns: list[dict[str, Any]], template: Mapping[str, Any], *, opened: bool
) -> str:
    """The chat template's text of messages, with the assistant's turn opened after them or not."""
    if not tokenizer.chat_template:
        raise DllmError(
            "the tokenizer has no chat template, so its model takes no conversations: write the prompt as it knows it, "
            "without chat; or put a chat_template.jinja into the checkpoint's folder"
        )
    for name in template:
        ours = inspect.signature(tokenizer.apply_chat_template).parameters.keys() - {"tools"} | {"messages"}
        if name in ours or not re.search(rf"\b{re.escape(name)}\b", str(tokenizer.chat_template)):
            raise DllmError(f"the model's chat template takes no {name!r:.60}; leave it out")
    try:
        return str(tokenizer.apply_chat_template(turns, add_generation_prompt=opened, tokenize=False, **template))
    except Exception as error:  # a template can fail in any way a program can
        raise DllmError(f"the chat template failed ({_reason(error)}); check the messages or the template") from error


def _any_of(tokens: Iterable[str]) -> str:
    """A pattern of the longest of some tokens; of nothing if there are none."""
    return "|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)"


_CUT = "\ue000cut\ue000"  # of a private use area, which no template and no benchmark knows


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Refuses what is no conversation; templates would render it as something else.

    Raises:
        DllmError: for an empty conversation, and naming the first turn without a known role or string content.
    """
    example = '[{"role": "user", "content": "Hello"}]'
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise DllmError(f"a conversation is a list of messages, not a {type(messages).__name__}; pass {example}")
    if not messages:
        raise DllmError(f"the conversation has no messages; pass at least one, such as {example}")
    for number, message in enumerate(messages):
        if fault := _fault(message):
            raise DllmError(f"message {number} {fault}; a message looks like {example[1:-1]}")


def special_tokens(tokenizer: "PreTrainedTokenizerBase") -> dict[str, int]:
    """Special token -> id: those that a text's decoding leaves out with `skip_special_tokens=True`."""
    return {token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special}


@functools.lru_cache(maxsize=4)  # half a second for a large vocabulary
def token_bytes(tokenizer: "PreTrainedTokenizerBase", vocab_size: int) -> tuple[bytes, ...]:
    """The UTF-8 bytes of each id: a decoded text is these joined, with broken characters replaced.

    Special tokens and undefined ids have none. Stop strings are matched on these bytes, across tokens. The table is
    cached: tokens that are added to the tokenizer later are not in it.

    Args:
        vocab_size: the model's; the length of the table.

    Raises:
        DllmError: for a tokenizer that is neither byte-level nor plain, whose tokens' bytes depend on neighbours.
    """
    to_bytes, special = _piece_decoder(tokenizer), special_tokens(tokenizer)
    pieces = [b""] * vocab_size
    for token, i in tokenizer.get_vocab().items():
        if i < vocab_size and token not in special:
            pieces[i] = to_bytes(token)
    return tuple(pieces)


def token_strings(tokenizer: "PreTrainedTokenizerBase", vocab_size: int) -> list[str]:
    """The text of each id alone: special tokens by name, parts of a character as `\\xNN`.

    Args and errors as of `token_bytes`.
    """
    strings = [piece.decode("utf-8", "backslashreplace") for piece in token_bytes(tokenizer, vocab_size)]
    for token, i in special_tokens(tokenizer).items():
        if i < vocab_size:
            strings[i] = token
    return strings


def settled_test(tokenizer: "PreTrainedTokenizerBase") -> Callable[[str], bool] | None:
    """A test of vocabulary entries: whether a text that ends with one stays as it is, whatever tokens follow, but for a
    character at its end of which bytes are missing.

    None for decoders that rewrite the joined text, for example by a pattern that is replaced in it.
    """
    joined, by_name, suffixes = False, False, list[str]()
    for part in _decoder_parts(tokenizer):
        if part["type"] not in _TOKEN_BY_TOKEN or (joined and not _keeps_beginnings(part)):
            return None
        joined |= part["type"] in ("Fuse", "ByteLevel")
        by_name |= part["type"] == "ByteFallback"
        suffixes += [part["suffix"]] if part["type"] == "BPEDecoder" else []

    def is_settled(token: str) -> bool:
        if by_name and token.startswith("<0x"):  # a run of bytes is a text, or if one does not fit none of them is
            return False
        return not any(suffix in token.removesuffix(suffix) for suffix in suffixes)  # a space, but at the text's end

    return is_settled


def _from_files(folder: Path) -> "PreTrainedTokenizerBase":
    import transformers  # takes a second, so only when needed

    parts: dict[str, Any] = {}
    if (folder / "tokenizer.json").is_file():
        pass
    elif (folder / "vocab.json").is_file():
        parts = {"tokenizer_object": _qwen2(folder)}
    elif (meta := read_json(folder / "meta.json")).get("vocab") == ASCII_VOCAB:
        parts = {"tokenizer_object": _ascii(meta, folder / "meta.json")}
    else:
        raise DllmError(f"{folder} has no tokenizer; put tokenizer.json, or vocab.json and merges.txt, into it")
    return transformers.PreTrainedTokenizerFast.from_pretrained(
        str(folder), local_files_only=True, trust_remote_code=False, **parts
    )


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silences warnings of transformers: that PyTorch is missing, and that a large vocabulary might be an old one of
    Mistral's."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _qwen2(folder: Path) -> tokenizers.Tokenizer:
    from transformers import Qwen2Tokenizer

    if not (folder / "merges.txt").is_file():
        raise DllmError(f"{folder} has a vocab.json but no merges.txt; copy that file too")
    vocab, merges = models.BPE.read_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    # Added tokens are part of the vocabulary, so that each keeps the id it was trained with, also after a gap.
    vocab = {**_added_tokens(folder), **vocab}
    if len(set(vocab.values())) < len(vocab):
        raise ValueError("one id belongs to two tokens")
    unnamed: dict[str, Any] = {"unk_token": None, "eos_token": None, "pad_token": None}
    return Qwen2Tokenizer(vocab=vocab, merges=cast(Any, merges), **unnamed).backend_tokenizer


def _ascii(meta: Mapping[str, Any], path: Path) -> tokenizers.Tokenizer:
    special = {token: meta[name] for name, token in _ASCII_TOKENS.items() if meta.get(name) is not None}
    if not all(type(i) is int and i >= 128 for i in special.values()) or len(set(special.values())) < len(special):
        raise DllmError(f"{path}: the special ids {special} must be different integers from 128 on; correct the file")
    vocab = {chr(i): i for i in range(128)} | special
    core = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<|unknown|>"))  # not in vocab: refuses, not replaces
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return core


def _added_tokens(folder: Path) -> dict[str, int]:
    """Added token -> id, from the files next to the vocabulary."""
    decoder = read_json(folder / "tokenizer_config.json").get("added_tokens_decoder") or {}
    return read_json(folder / "added_tokens.json") | {entry["content"]: int(i) for i, entry in decoder.items()}


def _check_ids(tokenizer: "PreTrainedTokenizerBase", added: Mapping[str, int]) -> None:
    vocab = tokenizer.get_vocab()
    for token, i in added.items():
        if vocab.get(token) != i:
            raise ValueError(f"its files disagree on the id of {token!r}, {vocab.get(token)} and {i}")


def _fit(tokenizer: "PreTrainedTokenizerBase", config: ModelConfig, folder: Path) -> None:
    """Completes a tokenizer from the model's config; refuses one of another model."""
    for name in ("bos", "eos", "pad", "mask"):
        i = getattr(config, f"{name}_id")
        if getattr(tokenizer, f"{name}_token") is None and i is not None:
            setattr(tokenizer, f"{name}_token", tokenizer.convert_ids_to_tokens(i))
    if tokenizer.chat_template is None:  # "" means that the model has no chat format
        family = FAMILIES.get(config.family)
        tokenizer.chat_template = family.chat_template if family else None
    advice = "use the model's own files"
    last = max(tokenizer.get_vocab().values(), default=-1)
    if last >= config.vocab_size:
        raise DllmError(
            f"{folder}: the tokenizer knows ids up to {last} but the model has {config.vocab_size}; {advice}"
        )
    if tokenizer.mask_token_id is not None and config.mask_id not in (None, tokenizer.mask_token_id):
        raise DllmError(
            f"{folder}: the tokenizer's mask token is {tokenizer.mask_token_id} but the model's is {config.mask_id}; "
            f"{advice}"
        )


def _fault(message: Any) -> str | None:
    if not isinstance(message, Mapping):
        return f"is of type {type(message).__name__}, not dict"
    if "role" not in message:
        return "has no role"
    if message["role"] not in ROLES:
        return f"has the unknown role {message['role']!r} (known: {', '.join(ROLES)})"
    if not isinstance(message.get("content"), str):
        return f"has {type(message.get('content')).__name__} content where a string must be"
    return None


def _reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _piece_decoder(tokenizer: "PreTrainedTokenizerBase") -> Callable[[str], bytes]:
    """The function from a vocabulary entry to the bytes it stands for."""
    kinds = {part["type"] for part in _decoder_parts(tokenizer)}
    if "ByteLevel" in kinds and kinds <= {"ByteLevel", "Fuse"}:
        return _byte_level
    if kinds == {"Fuse"}:
        return str.encode
    raise DllmError(
        f"bytes of single tokens are known for byte-level and plain tokenizers only, not for {sorted(kinds)}"
    )


def _decoder_parts(tokenizer: "PreTrainedTokenizerBase") -> list[dict[str, Any]]:
    """The steps of a tokenizer's decoder, in order."""
    decoder = getattr(tokenizer.backend_tokenizer, "decoder", None)
    state = json.loads(decoder.__getstate__()) if decoder is not None else {"type": "none"}
    return list(state.get("decoders", [state]))


# What these do to a token depends on its neighbours alone, and on whether it is the first.
_TOKEN_BY_TOKEN = set("none BPEDecoder ByteFallback ByteLevel CTC Fuse Metaspace Replace Strip WordPiece".split())


def _keeps_beginnings(part: Mapping[str, Any]) -> bool:
    """Whether a step of a decoder, given a longer text, gives one that begins with what it gave before."""
    if part["type"] == "Strip":
        return bool(part["stop"] == 0 and part["start"] <= 1)  # a stream may restart at a token that is a single space
    if part["type"] == "Replace":
        return len(part["pattern"].get("String", "")) == 1
    return part["type"] in ("Fuse", "Metaspace")


def _byte_level(token: str) -> bytes:
    try:
        return bytes(map(_byte_alphabet().__getitem__, token))
    except KeyError:  # an added token, written as itself
        return token.encode()


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for every byte: printable Latin-1 as itself, the others from U+0100 on, in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
