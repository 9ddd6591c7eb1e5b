"""Tokenizers of the tasks, as the files that `dllm_jax.text.tokenizer` reads from a checkpoint folder.

Special tokens have LLaDA's names. Text gets a byte-level BPE, boards and mazes one token per symbol.
"""

import dataclasses
import functools
import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers

from dllm_jax.errors import DllmError

EOS, MASK, EOT, BOS = "<|endoftext|>", "<|mdm_mask|>", "<|eot_id|>", "<|startoftext|>"
HEADERS = ("<|start_header_id|>", "<|end_header_id|>")  # of LLaDA's chat template
FILES = ("tokenizer.json", "tokenizer_config.json")

# A full stop, a colon, #### and a word before a number include the space after them, so that a number, of which two
# digits at a time are one token, is the same token everywhere.
_SPLIT = r"\p{N}{1,2}|[.:?]+ ?|#+ ?| ?\p{L}+(?: (?=\p{N}))?|\n\p{L}+|[^\s\p{L}\p{N}.:?#]|\s"


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """Size and special ids of a task's own tokens, for the config of a model that is trained on it."""

    size: int
    mask_id: int
    eos_id: int
    pad_id: int
    bos_id: int
    eot_id: int | None = None

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Ids that end an answer."""
        return (self.eos_id,) if self.eot_id is None else (self.eos_id, self.eot_id)


def train_bpe(texts: Iterable[str], folder: str | Path, *, vocab_size: int) -> Vocabulary:
    """Trains a byte-level BPE that keeps two digits, and no more, in a token, and writes it.

    Raises:
        DllmError: for a vocabulary that cannot hold all bytes, or a folder that cannot be written.
    """
    special = [EOS, MASK, EOT, BOS, *HEADERS]
    if vocab_size < 256 + len(special):
        raise DllmError(f"vocab_size is {vocab_size}; bytes and special tokens alone need {256 + len(special)}")
    core = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated")
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    return _write(core, folder)


def write_symbols(symbols: Mapping[str, int], pattern: str, folder: str | Path) -> Vocabulary:
    """Writes a tokenizer with one token per symbol, special tokens among them.

    Args:
        symbols: symbol -> id.
        pattern: regular expression of a symbol in text; spaces between symbols are dropped.

    Raises:
        DllmError: for a folder that cannot be written.
    """
    core = tokenizers.Tokenizer(models.WordLevel(dict(symbols), unk_token="<|unknown|>"))  # unknown: refused
    isolated = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    spaces = pre_tokenizers.Split(Regex(" +"), behavior="removed")
    core.pre_tokenizer = pre_tokenizers.Sequence([spaces, isolated])
    core.decoder = decoders.Fuse()
    named = [name for name in (EOS, MASK, EOT, BOS) if name in symbols]
    core.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in named])
    return _write(core, folder)


def load(folder: str | Path) -> tokenizers.Tokenizer:
    """The tokenizer in a folder.

    Raises:
        DllmError: when there is none.
    """
    try:
        return tokenizers.Tokenizer.from_file(str(Path(folder) / FILES[0]))
    except Exception as error:  # the library raises plain Exception
        raise DllmError(f"{Path(folder) / FILES[0]} could not be read ({error}); write it anew") from None


def vocabulary_of_symbols(symbols: Mapping[str, int]) -> Vocabulary:
    """Size and special ids of a table of symbols."""
    size = max(symbols.values()) + 1
    return Vocabulary(size, symbols[MASK], symbols[EOS], symbols[EOS], symbols[BOS], symbols.get(EOT))


def join(symbols: Mapping[str, int], ids: Iterable[int]) -> str:
    """Token ids as text, special tokens and unknown ids left out, as a tokenizer's `decode` does."""
    names = {i: symbol for symbol, i in symbols.items() if symbol not in (EOS, MASK, EOT, BOS)}
    return "".join(names.get(int(i), "") for i in ids)


@functools.cache
def vocabulary_of(folder: Path) -> Vocabulary:
    """Size and special ids of a tokenizer in a folder."""
    return _vocabulary(load(folder))


def copy(source: Path, folder: str | Path) -> None:
    """Copies a tokenizer's files into a folder, which is made where it does not exist.

    Raises:
        DllmError: when that fails.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name in FILES:
            shutil.copyfile(source / name, Path(folder) / name)
    except OSError as error:
        raise DllmError(f"the tokenizer could not be written to {folder} ({error}); name another folder") from None


def _write(core: tokenizers.Tokenizer, folder: str | Path) -> Vocabulary:
    vocabulary, folder = _vocabulary(core), Path(folder)
    names = {"bos_token": BOS, "eos_token": EOS, "pad_token": EOS, "mask_token": MASK}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILES[0]).write_text(core.to_str(pretty=True) + "\n", encoding="utf-8")
        (folder / FILES[1]).write_text(json.dumps(names, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise DllmError(f"the tokenizer could not be written to {folder} ({error}); name another folder") from None
    return vocabulary


def _vocabulary(core: tokenizers.Tokenizer) -> Vocabulary:
    vocabulary = core.get_vocab(with_added_tokens=True)
    if missing := [name for name in (EOS, MASK, BOS) if name not in vocabulary]:
        raise DllmError(f"the tokenizer lacks {', '.join(missing)}; write it anew")
    ids = {name: vocabulary[name] for name in (EOS, MASK, BOS)}
    size = core.get_vocab_size(with_added_tokens=True)
    return Vocabulary(size, ids[MASK], ids[EOS], ids[EOS], ids[BOS], core.token_to_id(EOT))
