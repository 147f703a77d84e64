"""Text goes to ids and back whole, however the stream is cut."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from tandem.detokenizer import BytePieces, IncrementalDetokenizer, WindowPieces, piece_decoder
from tandem.errors import CheckpointError, InvalidRequest
from tandem.stopping import StopMatcher
from tandem.tokenizer import Tokenizer

SAMPLES = ["the quick brown fox jumped over the lazy dog", "日本語のテキスト、中文字符", "é à ü ñ", "👩 🇯🇵 👍🏽"]
CHAT = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=special, show_progress=False)
    backend.train_from_iterator(SAMPLES * 4, trainer)
    backend.add_tokens(["<think>", AddedToken("plain space", normalized=False)])
    return backend


def byte_fallback() -> Backend:
    words = ["<unk>", *[f"<0x{byte:02X}>" for byte in range(256)], "▁", *"helowrd", "lo", "▁w", "日"]
    backend = Backend(
        models.BPE({w: i for i, w in enumerate(words)}, [("l", "o"), ("▁", "w")], unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>"])
    return backend


def word_piece() -> Backend:
    words = {w: i for i, w in enumerate(["[UNK]", "play", "##ing", "##ed", "chess", ",", "日"])}
    backend = Backend(models.WordPiece(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    return backend


BYTE_LEVEL, BYTE_FALLBACK, WORD_PIECE = byte_level(), byte_fallback(), word_piece()

FAMILY = "\u200d".join("👩👩👧👦")

# Text as people write it, with what breaks decoders mixed in: joiners, modifiers, flags, combining marks, U+FFFD itself.
TEXTS = st.lists(
    st.one_of(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
        st.sampled_from(
            [FAMILY, "👍🏽", "🇯🇵", "e\u0301", "क्षि", "日本語", "\ufffd", "\u200d", "<think>", "plain space", " ", "hello"]
        ),
    ),
    max_size=8,
).map("".join)


def pieces(detokenizer: IncrementalDetokenizer, ids: list[int], cuts: list[int]) -> list[str]:
    edges = [0, *sorted({min(c, len(ids)) for c in cuts}), len(ids)]
    return [*(detokenizer.push(ids[a:b]) for a, b in itertools.pairwise(edges)), detokenizer.flush()]


CUTS = st.lists(st.integers(0, 60), max_size=12)


@given(TEXTS, CUTS)
def test_byte_level_pieces_join_to_the_text(text: str, cuts: list[int]) -> None:
    ids = BYTE_LEVEL.encode(text).ids
    got = pieces(IncrementalDetokenizer(piece_decoder(BYTE_LEVEL)), ids, cuts)
    assert "".join(got) == BYTE_LEVEL.decode(ids) == text


@given(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() + 3), max_size=40), CUTS)
def test_byte_level_pieces_join_to_the_full_decode_of_any_ids(ids: list[int], cuts: list[int]) -> None:
    assert "".join(pieces(IncrementalDetokenizer(piece_decoder(BYTE_LEVEL)), ids, cuts)) == BYTE_LEVEL.decode(ids)


@given(TEXTS, CUTS)
def test_byte_fallback_pieces_join_to_the_full_decode(text: str, cuts: list[int]) -> None:
    ids = BYTE_FALLBACK.encode(text).ids
    assert "".join(pieces(IncrementalDetokenizer(piece_decoder(BYTE_FALLBACK)), ids, cuts)) == BYTE_FALLBACK.decode(ids)


@given(st.lists(st.integers(0, WORD_PIECE.get_vocab_size() - 1), max_size=30), CUTS)
def test_pieces_of_a_decoder_that_looks_at_neighbours_join_to_the_full_decode(ids: list[int], cuts: list[int]) -> None:
    decoder = piece_decoder(WORD_PIECE)
    assert isinstance(decoder, WindowPieces)
    assert "".join(pieces(IncrementalDetokenizer(decoder), ids, cuts)) == WORD_PIECE.decode(ids)


@given(TEXTS)
def test_a_character_of_several_tokens_is_never_delivered_in_part(text: str) -> None:
    ids = BYTE_LEVEL.encode(text).ids
    detokenizer = IncrementalDetokenizer(piece_decoder(BYTE_LEVEL))
    so_far = ""
    for token_id in ids:
        so_far += detokenizer.push([token_id])
        assert text.startswith(so_far)


def test_an_unfinished_character_at_the_end_becomes_one_replacement_character() -> None:
    detokenizer = IncrementalDetokenizer(BytePieces([b"\xf0", b"\x9f\x91", b"a"]))
    assert detokenizer.push([2, 0, 1]) == "a"
    assert detokenizer.flush() == "\ufffd"


def test_the_work_per_token_does_not_grow_with_the_answer() -> None:
    stream = IncrementalDetokenizer(piece_decoder(WORD_PIECE))
    for _ in range(500):
        stream.push([1, 2])
    assert len(stream._stream._ids) < 20  # type: ignore[attr-defined]


STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


def first_stop(text: str, stops: list[str]) -> str | None:
    """The text before the stop string that is complete first, by trying every end; None: no stop string."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            return text[: end - max(map(len, hits))]
    return None


@given(st.text("abc", max_size=30), STOPS, CUTS)
def test_stop_strings_are_found_however_the_text_is_cut(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(stops)
    edges = [0, *sorted({min(c, len(text)) for c in cuts}), len(text)]
    got = "".join(matcher.push(text[a:b]) for a, b in itertools.pairwise(edges))
    expected = first_stop(text, stops)
    assert matcher.stopped == (expected is not None)
    assert got + matcher.flush() == (text if expected is None else expected)


@given(st.text("ab", max_size=20), STOPS)
def test_only_what_may_begin_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    so_far = ""
    for character in text:
        so_far += matcher.push(character)
        if matcher.stopped:
            break
        held = text[len(so_far) :][: len(matcher._held)]
        assert held == "" or any(stop.startswith(held) for stop in stops)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    BYTE_LEVEL.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT, "eos_token": "<|im_end|>"}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 9}}))
    return tmp_path


def test_end_tokens_come_from_all_the_files_that_name_them(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.eos_ids == {7, 8, 9, BYTE_LEVEL.token_to_id("<|im_end|>")}
    assert tokenizer.vocab_size == BYTE_LEVEL.get_vocab_size()
    assert tokenizer.decode(tokenizer.encode("hello 👍🏽")) == "hello 👍🏽"


def test_a_conversation_is_rendered_by_the_models_template(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    ids = tokenizer.encode_chat(messages).token_ids
    expected = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert ids == BYTE_LEVEL.encode(expected).ids


def test_what_the_template_refuses_is_the_clients_mistake(folder: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"chat: .*no tools here"):
        Tokenizer.load(folder).encode_chat([{"role": "tool", "content": "x"}])


def test_a_model_without_chat_template_says_so(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(InvalidRequest, match="no chat template"):
        Tokenizer.load(folder).encode_chat([{"role": "user", "content": "x"}])


def test_a_folder_without_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        Tokenizer.load(tmp_path / "nowhere")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_loading_brings_no_torch(folder: Path) -> None:
    code = (
        "import sys; from tandem.tokenizer import Tokenizer; t = Tokenizer.load(sys.argv[1]);"
        "t.encode_chat([dict(role='user', content='x')]);"
        "sys.exit(int('torch' in sys.modules or 'transformers' in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(folder)], check=False).returncode == 0
