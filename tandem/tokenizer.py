"""Text to token ids and back, without torch: the folder's tokenizer.json is run by `tokenizers` directly.

A folder that has no tokenizer.json is opened by transformers' AutoTokenizer, which costs seconds at start.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tandem.chat_parser import ChatFormat
from tandem.detokenizer import BytePieces, IncrementalDetokenizer, PieceDecoder, piece_decoder
from tandem.errors import CheckpointError, InvalidRequest

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

__all__ = ["ChatPrompt", "IncrementalDetokenizer", "Tokenizer", "require_tokenizer"]

_TEMPLATE_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_ALL = 2**62
_CHARS_PER_TOKEN = 16  # few texts have more
_CUT_TOKENS = 64  # as many more may a head have than the same characters within their text


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """token_ids: up to where the assistant's next message begins. form: how the answer is to be taken apart."""

    token_ids: list[int]
    form: ChatFormat = field(default_factory=ChatFormat)


class Tokenizer:
    """Of one model. Safe to share between requests: it never changes once loaded.

    eos_ids: token ids that end an answer, from generation_config.json, config.json and the tokenizer's own settings.
    vocab_size: ids that the tokenizer itself knows; the model's may be padded to more.
    """

    def __init__(self, backend: Backend, settings: Mapping[str, Any], template: str | None, eos_ids: frozenset[int]) -> None:
        self._backend = backend
        self._settings = settings
        self._template = template
        self._render: Callable[..., str] | None = None
        self._decoder: PieceDecoder = piece_decoder(backend)
        self.eos_ids = eos_ids
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """The tokenizer of a checkpoint folder.

        Raises:
            CheckpointError: no tokenizer is there, or a file of it cannot be read; names the file.
        """
        root = Path(folder)
        settings = _read_json(root / "tokenizer_config.json")
        backend = _load_backend(root)
        eos = _ids(_read_json(root / "generation_config.json").get("eos_token_id"))
        config = _read_json(root / "config.json")
        for part in (config, config.get("text_config") or {}):
            eos |= _ids(part.get("eos_token_id"))
        if token := _token_text(settings.get("eos_token")):
            own = backend.token_to_id(token)
            eos |= set() if own is None else {own}
        return cls(backend, settings, _read_template(root, settings), frozenset(eos))

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str, enough: int = _ALL) -> list[int]:
        """Token ids of a prompt, with the special tokens that the model wants around it (often none). More than `enough` ids
        mean that there are at least so many: the rest of a text that is far too long is not looked at."""
        return self._ids_of(text, True, enough)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] = MappingProxyType({}),
        enough: int = _ALL,
    ) -> ChatPrompt:
        """messages: each with role and content at least, as the template has them; tools: in OpenAI's form; options: more
        variables for the template; enough: as for `encode`.

        Raises:
            InvalidRequest: the model has no chat template, or the template refuses these messages or knows no tools.
        """
        if self._template is None:
            raise InvalidRequest("chat", "this model has no chat template; send the prompt as text or token ids")
        if tools and "tools" not in self._template:
            raise InvalidRequest("chat.tools", "this model's chat template takes no tools")
        if self._render is None:
            self._render = _compile_template(self._template)
        special = {
            name: _token_text(self._settings.get(name)) or "" for name in ("bos_token", "eos_token", "unk_token", "pad_token")
        }
        variables = {**options, **special, "messages": list(messages), "tools": list(tools) or None}
        text = self._render(**{"add_generation_prompt": True, **variables})
        reasons = "<think>" in self._template
        form = ChatFormat(reasons, reasons and text.rstrip().endswith("<think>"), tools)
        return ChatPrompt(self._ids_of(text, False, enough), form)

    def _ids_of(self, text: str, add_special_tokens: bool, enough: int) -> list[int]:
        head_chars = _CHARS_PER_TOKEN * (enough + 1)
        while head_chars < len(text):
            ids = self._encode(text[:head_chars], add_special_tokens)
            if len(ids) > enough + _CUT_TOKENS:
                return ids
            head_chars *= 4
        return self._encode(text, add_special_tokens)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """A batch of one: unlike `encode` it lets other threads run meanwhile, and it computes no offsets."""
        return list(self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def to_json(self) -> str:
        """As a tokenizer.json has it."""
        return str(self._backend.to_str())

    def decode(self, ids: Sequence[int]) -> str:
        """Text of an answer; special tokens and ids that nobody knows have none."""
        return str(self._backend.decode(list(ids), skip_special_tokens=True))

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for, which may be part of a character only. A special token shows its own name."""
        if not 0 <= token_id < self.vocab_size:
            return b""
        if isinstance(self._decoder, BytePieces):
            pieces = self._decoder.pieces
            if token_id < len(pieces) and pieces[token_id]:
                return pieces[token_id]
        return str(self._backend.decode([token_id], skip_special_tokens=False)).encode()

    def detokenizer(self) -> IncrementalDetokenizer:
        """For one answer."""
        return IncrementalDetokenizer(self._decoder)


def require_tokenizer(root: Path) -> None:
    """Without reading any of it.

    Raises:
        CheckpointError: the folder holds no tokenizer's files.
    """
    if not any((root / name).is_file() for name in _VOCABULARIES):
        raise CheckpointError(f"{root} holds no tokenizer.json, nor any other vocabulary: fetch the checkpoint again")


def _load_backend(root: Path) -> Backend:
    path = root / "tokenizer.json"
    if path.is_file():
        from tokenizers import Tokenizer as Backend

        try:
            return Backend.from_file(str(path))
        except Exception as error:
            raise CheckpointError(f"{path} is not a tokenizer that can be read: {error}") from error
    if not root.is_dir():
        raise CheckpointError(f"there is no tokenizer folder {root}")
    require_tokenizer(root)  # transformers makes an empty one of nothing
    from transformers import AutoTokenizer

    try:
        slow = AutoTokenizer.from_pretrained(str(root), local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise CheckpointError(f"{root} has no tokenizer.json, and its tokenizer cannot be opened otherwise: {error}") from error
    backend: Backend | None = getattr(slow, "backend_tokenizer", None)
    if backend is None:
        raise CheckpointError(f"{root} has no tokenizer.json and its tokenizer has no fast form; convert it with transformers")
    return backend


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return data


def _ids(value: object) -> set[int]:
    values = value if isinstance(value, list) else [value]
    return {v for v in values if isinstance(v, int) and not isinstance(v, bool)}


def _token_text(value: object) -> str | None:
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read_template(root: Path, settings: Mapping[str, Any]) -> str | None:
    file = root / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error
    found = settings.get("chat_template") or _read_json(root / "chat_template.json").get("chat_template")
    if isinstance(found, list):
        found = next((entry.get("template") for entry in found if entry.get("name") == "default"), None)
    return found if isinstance(found, str) else None


def _compile_template(source: str) -> Callable[..., str]:
    """The environment that templates of the hub are written for: sandboxed, with loop controls, `raise_exception` and
    `strftime_now`, and a `tojson` that does not escape for HTML."""
    from datetime import datetime

    import jinja2
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: object, indent: int | None = None, ensure_ascii: bool = False, **_: object) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        template = environment.from_string(source)
    except jinja2.TemplateError as error:
        raise InvalidRequest("chat", f"the model's chat template cannot be used: {error}") from error

    def render(**values: object) -> str:
        try:
            return template.render(**values)
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise InvalidRequest("chat", f"the model's chat template refuses these messages: {error}") from error

    return render
