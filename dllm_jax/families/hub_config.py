"""The `config.json` of a hub checkpoint, field by field: what decides results is there and fits, or is refused."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from dllm_jax.errors import DllmError


@dataclasses.dataclass(frozen=True)
class HubConfig:
    """The fields of a `config.json`, and what the files next to it say about special tokens.

    Attributes:
        values: the JSON object.
        where: path for error messages.
        name: what the checkpoint is published as, or its folder's name: see `folder_name`.
        block_length: what the user says of it, for families whose `config.json` does not; None where nothing is said.
        generation, tokenizer, meta: `generation_config.json`, `tokenizer_config.json` and the `meta.json` of our test
            checkpoints; {} without one.
        tokens: id by text of the tokenizer's added tokens.
    """

    values: Mapping[str, Any]
    where: str
    name: str = ""
    block_length: int | None = None
    generation: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tokenizer: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    meta: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tokens: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def integer(self, name: str, *, least: int = 1) -> int:
        """A field that must be an integer of at least `least`."""
        value = self._required(name)
        if type(value) is not int or not least <= value < 2**31:
            raise DllmError(f"{self.where}: {name} is {value!r}, but must be an integer from {least} to {2**31 - 1}")
        return value

    def integer_or_null(self, name: str) -> int | None:
        """A field that must be there and be a positive integer or null."""
        return None if self._required(name) is None else self.integer(name)

    def number(self, name: str) -> float:
        """A field that must be a positive number."""
        value = self._required(name)
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise DllmError(f"{self.where}: {name} is {value!r}, but must be a positive number")
        return float(value)

    def boolean(self, name: str) -> bool:
        """A field that must be true or false."""
        value = self._required(name)
        if type(value) is not bool:
            raise DllmError(f"{self.where}: {name} is {value!r}, but must be true or false")
        return value

    def require(self, **expected: Any) -> None:
        """Fields that must be there and have the one value that is implemented."""
        for name, value in expected.items():
            self._refuse_other(name, self._required(name), (value,))

    def allow(self, name: str, *implemented: Any) -> None:
        """A field that may be missing, else must have one of the implemented values."""
        if name in self.values:
            self._refuse_other(name, self.values[name], implemented)

    def heads(self, width: str, heads: str) -> tuple[int, int]:
        """(number of heads, width of one) where the config gives only the total width."""
        total, number = self.integer(width), self.integer(heads)
        if total % number:
            raise DllmError(f"{self.where}: {width} {total} is not a multiple of {heads} {number}")
        return number, total // number

    def eos_ids(self) -> tuple[int, ...]:
        """`eos_token_id` of the config, which may be a list; the first one is the end of sequence."""
        value = self._required("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        if not ids or not all(type(token) is int and token >= 0 for token in ids):
            raise DllmError(f"{self.where}: eos_token_id is {value!r}, but must be a token id or a list of them")
        return tuple(ids)

    def bos_id(self, text: str, vocab_size: int, published: int | None) -> int | None:
        """The id put in front of prompts, or None: the added token `text`, else the published one, else the config's.

        A `bos_token_id` equal to the end of sequence is a placeholder (Dream's is), not a beginning.
        """
        token = self.tokens.get(text, published)
        token = self.values.get("bos_token_id") if token is None else token
        return token if type(token) is int and 0 <= token < vocab_size and token not in self.eos_ids() else None

    def mask_id(self, otherwise: int | None) -> int:
        """`mask_token_id`, or where a config leaves it out `otherwise`, of the tokenizer or the published model."""
        if self.values.get("mask_token_id") is None and otherwise is not None:
            return otherwise
        return self.integer("mask_token_id", least=0)

    def pad_id(self) -> int:
        """`pad_token_id` of the config, else of the generation config, else the id of the tokenizer's `pad_token`."""
        token = self.tokenizer.get("pad_token")
        text = token.get("content") if isinstance(token, dict) else token
        candidates = (self.values.get("pad_token_id"), self.generation.get("pad_token_id"), self.tokens.get(str(text)))
        found = next((candidate for candidate in candidates if candidate is not None), None)
        if type(found) is not int or found < 0:
            raise DllmError(f"{self.where}: pad_token_id is {found!r}, but must be a token id; add it to the file")
        return found

    def pad_or_eos_id(self, vocab_size: int) -> int:
        """`pad_token_id` of a config that may have none or one outside the vocabulary, else the end of sequence."""
        pad = self.values.get("pad_token_id")
        return pad if type(pad) is int and 0 <= pad < vocab_size else self.eos_ids()[0]

    def end_ids(self, end_of_turn: str, vocab_size: int, published: int | None) -> tuple[int, ...]:
        """The ids that end an answer: end of sequence, end of turn, and what the generation config adds.

        Args:
            end_of_turn: text of the token that ends a turn, looked up among the tokenizer's added tokens.
            published: its id in the published vocabulary, for a folder of that vocabulary without tokenizer files.
        """
        turn = self.tokens.get(end_of_turn, self.meta.get("eot_id", published))
        more = self.generation.get("eos_token_id")
        found = [*self.eos_ids(), turn, *(more if isinstance(more, list) else [more])]
        return tuple(dict.fromkeys(token for token in found if type(token) is int and 0 <= token < vocab_size))

    def _required(self, name: str) -> Any:
        if name not in self.values:
            raise DllmError(
                f"{self.where} lacks the field {name}, which decides results; take the original config.json"
            )
        return self.values[name]

    def _refuse_other(self, name: str, value: Any, implemented: tuple[Any, ...]) -> None:
        if not any(value == one and type(value) is type(one) for one in implemented):
            wanted = " or ".join(json.dumps(one) for one in implemented)
            raise DllmError(f"{self.where}: {name} = {json.dumps(value)} is not implemented, only {wanted}")
