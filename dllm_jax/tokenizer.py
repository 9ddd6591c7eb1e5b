"""Tokenizers from the files of a checkpoint folder; nothing is downloaded and no code of a checkpoint is run.

Three kinds of files are understood, the first one found is used:

* `tokenizer.json`, the format of the `tokenizers` library (LLaDA, Qwen2.5).
* `vocab.json` and `merges.txt`, byte-level BPE with Qwen2's pre-tokenizer (Dream). Added tokens come from
  `tokenizer_config.json` or `added_tokens.json`.
* `meta.json` with `"vocab": "token ids 0-127 are ASCII bytes"`, the tiny test checkpoints. The ids under `eos_id`,
  `mask_id` and `eot_id` become `<|endoftext|>`, `<|mask|>` and `<|eot_id|>`; the other ids are unused.

`tokenizer_config.json` and `special_tokens_map.json` name the special tokens. A `chat_template.jinja`, or the
`chat_template` in `tokenizer_config.json`, takes precedence over the family's built-in template.
"""

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from dllm_jax import chat
from dllm_jax.config import ModelConfig
from dllm_jax.errors import DllmError

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
"""Every file that is read from a folder; a converter copies those that exist."""

ASCII_VOCAB = "token ids 0-127 are ASCII bytes"
_ASCII_TOKENS = {"eos_id": "<|endoftext|>", "mask_id": "<|mask|>", "eot_id": "<|eot_id|>"}
_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "mask_token", "cls_token", "sep_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Tokenizer:
    """Text to token ids and back, for one model.

    Attributes:
        vocab_size: number of ids the model can emit, the length of `token_bytes()`. The files may define fewer.
        special_tokens: special token -> id. They are found inside encoded text and left out of decoded text.
        names: "bos_token", "eos_token", ... -> special token, as far as the files name them.
        bos_id: the id that `encode(..., add_special=True)` puts in front, or None.
    """

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        config: ModelConfig,
        *,
        names: Mapping[str, str] | None = None,
        template: str | None = None,
    ) -> None:
        """Wraps a tokenizer of the `tokenizers` library.

        Args:
            names: "bos_token", ... -> token; tokens that the vocabulary lacks are dropped.
            template: a Jinja chat template; None takes the family's built-in one.

        Raises:
            DllmError: when its ids do not fit into the model's vocabulary, or its mask token is not the model's.
        """
        core.no_truncation()
        core.no_padding()
        self._core, self._config, self._template = core, config, template
        self.vocab_size = config.vocab_size
        self.names = {name: token for name, token in (names or {}).items() if core.token_to_id(token) is not None}
        core.add_special_tokens([_as_special(core, token) for token in self.names.values()])
        self._added = core.get_added_tokens_decoder()
        self.special_tokens = {token.content: i for i, token in self._added.items() if token.special}
        self.bos_id = self._bos_id()
        self._check()

    @classmethod
    def from_folder(cls, path: str | Path, config: ModelConfig) -> "Tokenizer":
        """Builds the tokenizer of a checkpoint folder from its local files; see the module's text for which.

        Raises:
            DllmError: when the folder has no tokenizer files, a file is damaged, or they do not fit the model.
        """
        folder = Path(path)
        settings, named = _read_json(folder / "tokenizer_config.json"), _read_json(folder / "special_tokens_map.json")
        names = {**_names(named), **_names(settings)}
        added = _added_tokens(folder, settings, {*names.values(), *_extra_special(named), *_extra_special(settings)})
        core = _core(folder, added)
        try:
            return cls(core, config, names=names, template=_template(folder, settings))
        except DllmError as error:
            raise DllmError(f"{folder}: {error}") from None

    def encode(self, text: str, *, add_special: bool = False) -> list[int]:
        """Token ids of a text; special tokens written in it become their ids.

        Args:
            add_special: put `bos_id` in front, if there is one (a base model's prompt). Chat texts bring their own.

        Raises:
            DllmError: for anything but a string, and for characters that the vocabulary cannot express.
        """
        if not isinstance(text, str):
            raise DllmError(f"only strings can be encoded, not a {type(text).__name__}; encode the texts one by one")
        try:
            ids = self._core.encode(text, add_special_tokens=False).ids
        except Exception as error:  # the library raises plain Exception, also for lone surrogates
            raise DllmError(f"{text[:40]!r} cannot be expressed in this vocabulary ({error})") from None
        return [self.bos_id, *ids] if add_special and self.bos_id is not None else ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of token ids; ids that the vocabulary does not define contribute nothing.

        Args:
            skip_special: leave special tokens out, else they appear by their names.

        Raises:
            DllmError: for ids outside the vocabulary.
        """
        numbers = ids.tolist() if hasattr(ids, "tolist") else [int(i) for i in ids]  # arrays: one copy to the host
        for i in numbers:
            if not isinstance(i, int) or not 0 <= i < self.vocab_size:
                raise DllmError(f"{i} is no token id of this vocabulary; decode one row of ids below {self.vocab_size}")
        return self._core.decode(numbers, skip_special_tokens=skip_special)

    def apply_chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """A conversation as the text the model was trained on.

        Args:
            messages: `[{"role": "user", "content": "..."}, ...]`; roles are system, user and assistant.
            add_generation_prompt: end with the opening of the assistant's turn. LLaDA's template always does.

        Raises:
            DllmError: for messages of another shape, a template that fails, or a family without one.
        """
        template = self._template or chat.BUILT_IN.get(self._config.family)
        if template is None:
            raise DllmError(
                f"no chat template is known for {self._config.family} models; put a chat_template.jinja into the folder"
            )
        return chat.render(template, messages, tokens=self._named(), add_generation_prompt=add_generation_prompt)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation, ready to be a prompt; arguments and errors as in `apply_chat`."""
        return self.encode(self.apply_chat(messages, add_generation_prompt=add_generation_prompt))

    def token_bytes(self) -> list[bytes]:
        """What each id adds to a decoded text, in UTF-8: decoding is joining these and replacing broken characters.

        Special tokens and undefined ids add nothing. Stop strings are matched on these, across token borders.

        Raises:
            DllmError: for a tokenizer whose tokens do not simply follow each other (not byte-level, not plain).
        """
        return list(self._token_bytes)

    def token_strings(self) -> list[str]:
        """How each id looks alone on a screen: special tokens by name, parts of a character as `\\xNN`.

        Raises:
            DllmError: as `token_bytes`.
        """
        strings = [piece.decode("utf-8", "backslashreplace") for piece in self._token_bytes]
        for token, i in self.special_tokens.items():
            strings[i] = token
        return strings

    @functools.cached_property
    def _token_bytes(self) -> list[bytes]:
        to_bytes = _piece_decoder(self._core)
        pieces = [b""] * self.vocab_size
        for token, i in self._core.get_vocab(with_added_tokens=True).items():
            pieces[i] = to_bytes(token)
        for i in self.special_tokens.values():
            pieces[i] = b""
        return pieces

    def _bos_id(self) -> int | None:
        named = self._core.token_to_id(self.names["bos_token"]) if "bos_token" in self.names else self._config.bos_id
        return named if named is not None and self._core.id_to_token(named) is not None else None

    def _named(self) -> dict[str, str]:
        bos = None if self.bos_id is None else self._core.id_to_token(self.bos_id)
        return {"bos_token": bos, **self.names} if bos is not None else self.names

    def _check(self) -> None:
        last = max(self._core.get_vocab(with_added_tokens=True).values(), default=-1)
        if last >= self.vocab_size:
            raise DllmError(
                f"the tokenizer knows ids up to {last} but the model has {self.vocab_size}; use the model's own files"
            )
        mask = self._core.token_to_id(self.names["mask_token"]) if "mask_token" in self.names else None
        if mask is not None and self._config.mask_id not in (None, mask):
            raise DllmError(
                f"the tokenizer's mask token is {mask} but the model's is {self._config.mask_id}; "
                "use the model's own files"
            )


def has_tokenizer(folder: str | Path) -> bool:
    """Whether a folder holds the files of a tokenizer, so that `Tokenizer.from_folder` can be expected to work."""
    folder = Path(folder)
    if any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json")):
        return True
    return _read_json(folder / "meta.json").get("vocab") == ASCII_VOCAB


def _core(folder: Path, added: Mapping[str, tuple[int, AddedToken]]) -> tokenizers.Tokenizer:
    if (folder / "tokenizer.json").is_file():
        return _from_tokenizer_json(folder / "tokenizer.json", added)
    if (folder / "vocab.json").is_file():
        return _from_vocab_and_merges(folder, added)
    if (meta := _read_json(folder / "meta.json")).get("vocab") == ASCII_VOCAB:
        return _ascii(meta, folder / "meta.json")
    raise DllmError(f"{folder} has no tokenizer; put tokenizer.json, or vocab.json and merges.txt, into it")


def _from_tokenizer_json(path: Path, added: Mapping[str, tuple[int, AddedToken]]) -> tokenizers.Tokenizer:
    try:
        core = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise DllmError(f"{path} could not be read ({error}); copy the file again") from None
    known = {token.content for token in core.get_added_tokens_decoder().values()}
    _add(core, {token: entry for token, entry in added.items() if token not in known}, path)
    return core


def _from_vocab_and_merges(folder: Path, added: Mapping[str, tuple[int, AddedToken]]) -> tokenizers.Tokenizer:
    vocab_file, merges_file = folder / "vocab.json", folder / "merges.txt"
    if not merges_file.is_file():
        raise DllmError(f"{folder} has a vocab.json but no merges.txt; copy that file too")
    # Added tokens are put into the vocabulary so that each gets the id it was trained with, holes or not.
    vocab = {**{token: i for token, (i, _) in added.items()}, **_read_vocab(vocab_file)}
    if len(set(vocab.values())) < len(vocab):
        raise DllmError(
            f"{vocab_file} and the added tokens give one id to two tokens; copy the tokenizer's files again"
        )
    merges = _read_merges(merges_file)
    try:
        core = tokenizers.Tokenizer(models.BPE(vocab, merges))
    except Exception as error:
        raise DllmError(f"{vocab_file} and {merges_file.name} do not fit ({error}); copy both again") from None
    core.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(_QWEN2_SPLIT), behavior="isolated")
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    _add(core, added, vocab_file)
    return core


def _ascii(meta: Mapping[str, Any], path: Path) -> tokenizers.Tokenizer:
    special = {token: meta[name] for name, token in _ASCII_TOKENS.items() if meta.get(name) is not None}
    if not all(_is_id(i) and i >= 128 for i in special.values()) or len(set(special.values())) < len(special):
        raise DllmError(f"{path}: the special ids {special} must be different integers from 128 on; correct the file")
    vocab = {chr(i): i for i in range(128)} | special
    core = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<|unknown|>"))  # not in vocab: refuses, not replaces
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens([_as_special(core, token) for token in special])
    return core


def _add(core: tokenizers.Tokenizer, added: Mapping[str, tuple[int, AddedToken]], where: Path) -> None:
    for token, (i, entry) in sorted(added.items(), key=lambda item: item[1][0]):
        core.add_tokens([entry])
        if (found := core.token_to_id(token)) != i:
            files = f"{where}, tokenizer_config.json and added_tokens.json"
            raise DllmError(f"{files} disagree on the id of {token!r} ({found} and {i}); copy all from one checkpoint")


def _as_special(core: tokenizers.Tokenizer, token: str) -> AddedToken:
    known = {entry.content: entry for entry in core.get_added_tokens_decoder().values()}
    if token not in known:
        return AddedToken(token, special=True, normalized=False)
    old = known[token]
    return AddedToken(token, special=True, **{name: getattr(old, name) for name in _FLAGS})


def _added_tokens(folder: Path, settings: Mapping[str, Any], special: set[str]) -> dict[str, tuple[int, AddedToken]]:
    """Added token -> (id, token with its flags); tokenizer_config.json overrules the older added_tokens.json."""
    path = folder / "added_tokens.json"
    added: dict[str, tuple[int, AddedToken]] = {}
    for token, i in _read_json(path).items():
        if not _is_id(i) or not _is_text(token):
            raise DllmError(f"{path} gives the token {token!r} the id {i!r}; correct that entry")
        added[token] = (i, AddedToken(token, special=token in special, normalized=False))
    entries = settings.get("added_tokens_decoder") or {}
    if not isinstance(entries, dict):
        raise DllmError(
            f"{folder / 'tokenizer_config.json'}: added_tokens_decoder is no JSON object; copy the file again"
        )
    for i, entry in entries.items():
        content = _content(entry)
        if content is None or not i.isdecimal():
            raise DllmError(
                f"{folder / 'tokenizer_config.json'}: added_tokens_decoder has no token id and text at {i!r}; "
                "copy the file again"
            )
        flags = {name: entry.get(name) is True for name in _FLAGS} if isinstance(entry, dict) else {}
        marked = content in special or (isinstance(entry, dict) and entry.get("special") is True)
        added[content] = (int(i), AddedToken(content, special=marked, **flags))
    return added


def _names(settings: Mapping[str, Any]) -> dict[str, str]:
    tokens = {name: _content(settings.get(name)) for name in _NAMES}
    return {name: token for name, token in tokens.items() if token}


def _extra_special(settings: Mapping[str, Any]) -> list[str]:
    extra = settings.get("additional_special_tokens")
    tokens = [_content(entry) for entry in extra] if isinstance(extra, list) else []
    return [token for token in tokens if token]


def _content(entry: Any) -> str | None:
    """The text of a token that a file gives as a string or as an object with flags."""
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) and _is_text(text) else None


def _is_text(text: str) -> bool:
    """False for half a surrogate pair, which JSON can write and no tokenizer can hold."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return _read_text(path)
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named templates, of which "default" is for plain chats
        named = (entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default")
        template = next((entry.get("template") for entry in named), template)
    if template is not None and not isinstance(template, str):
        raise DllmError(
            f"{folder / 'tokenizer_config.json'}: chat_template is neither a string nor a list with a default; "
            "correct it or remove it"
        )
    return template


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DllmError(f"{path} could not be read ({error}); copy the file again") from None


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} when there is no such file."""
    if not path.is_file():
        return {}
    try:
        values = json.loads(_read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise DllmError(f"{path} is not valid JSON ({error}); copy the file again") from None
    if not isinstance(values, dict):
        raise DllmError(f"{path} holds no JSON object; copy the file again")
    return values


def _read_vocab(path: Path) -> dict[str, int]:
    vocab = _read_json(path)
    if not vocab or not all(map(_is_id, vocab.values())) or len(set(vocab.values())) < len(vocab):
        raise DllmError(f"{path} does not give every token an id of its own; copy the file again")
    return vocab


def _read_merges(path: Path) -> list[tuple[str, str]]:
    merges = []
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        line = line.removesuffix("\r")
        if not line or (number == 1 and line.startswith("#version")):
            continue
        left, _, right = line.partition(" ")
        if not left or not right or " " in right:
            raise DllmError(f"{path} line {number} is not a pair of tokens; copy the file again")
        merges.append((left, right))
    return merges


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _piece_decoder(core: tokenizers.Tokenizer) -> Callable[[str], bytes]:
    """The function from a vocabulary entry to the bytes it stands for."""
    state = json.loads(core.decoder.__getstate__()) if core.decoder is not None else {"type": "none"}
    kinds = {part["type"] for part in state.get("decoders", [state])}
    if "ByteLevel" in kinds and kinds <= {"ByteLevel", "Fuse"}:
        return _byte_level
    if kinds == {"Fuse"}:
        return str.encode
    raise DllmError(
        f"bytes of single tokens are known for byte-level and plain tokenizers only, not for {sorted(kinds)}"
    )


def _byte_level(token: str) -> bytes:
    table = _byte_alphabet()
    if all(character in table for character in token):
        return bytes(table[character] for character in token)
    return token.encode()  # an added token, written as itself


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for every byte: printable Latin-1 as itself, the others from U+0100 on, in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
