"""A tokenizer as `tokenizer.json`, the file that transformers.js, `tokenizers` and most other runtimes read.

SentencePiece models are built anew of their pieces, and byte and byte-level BPE ones of how they run here. The ids of
both are compared over `texts_by_kind`: where a kind of text gets others, the export says so.
Sources: sentencepiece, src/normalizer.cc, src/unigram_model.cc and src/bpe_model.cc; transformers,
convert_slow_tokenizer.py; @huggingface/tokenizers 0.2.0, dist/tokenizers.mjs.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as LibraryTokenizer

from commands.exporting.vocabulary import Vocabulary
from data.tokenizers.backends import TOKENIZER_FILE, LibraryBackend
from data.tokenizers.published import Published, byte_letters, end_with
from data.tokenizers.tokenizer import Tokenizer
from settings.program import needs
from support.language import Message, join, say

if TYPE_CHECKING:  # Its library is loaded for its files alone.
    from data.tokenizers.spiece import SentencePieceBackend

BLANK = "▁"
# Kinds of pieces in a SentencePiece model's file.
NORMAL = 1
USER_DEFINED = 4
NEVER = 8  # A piece with this multiple of the worst score is in no best spelling of a text.
PRIVATE_USE = 0x10FF00  # Letters that nobody uses begin here.
COMPATIBLE = "ﬁ①ａ"  # NFKC changes each of these.
# What transformers.js makes a blank or nothing of, whatever the table says; NFKC changes the first one.
OTHERWISE_IN_JS = "～\u2581\ufeff\ufffd" + "".join(map(chr, (*range(1, 32), 0x7F, 0x8F, 0x9F, *range(0x2000, 0x2010))))
# The ends of a text, in words that JavaScript understands too.
FIRST = r"(?<![\s\S])"
LAST = r"(?![\s\S])"
RARE = ("😀", "👩🏽‍🚀", "🇩🇪", "❤️", "𝔘", "𓀀", "ꙮ", "㍿", "ⅷ")
SENTENCES = (
    "All human beings are born free and equal in dignity and rights.",
    "translate English to German: The house is wonderful, isn't it? (Yes: 3.14 - 1,024!)",
    "Alle Menschen sind frei und gleich an Würde und Rechten geboren.",
    "Tous les êtres humains naissent libres et égaux en dignité et en droits.",
    "Todos los seres humanos nacen libres e iguales; ¿no?",
    "Wszyscy ludzie rodzą się wolni i równi pod względem swej godności.",
    "Všichni lidé rodí se svobodní a sobě rovní co do důstojnosti.",
    "Tất cả mọi người sinh ra đều được tự do và bình đẳng về nhân phẩm.",
    "Bütün insanlar hür, haysiyet ve haklar bakımından eşit doğarlar.",
    "Все люди рождаются свободными и равными в своём достоинстве.",
    "Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι στην αξιοπρέπεια.",
    "Բոլոր մարդիկ ծնվում են ազատ ու հավասար:",
    "כל בני אדם נולדו בני חורין ושווים בערכם ובזכויותיהם.",
    "يولد جميع الناس أحراراً متساوين في الكرامة والحقوق.",
    "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता प्राप्त है।",
    "মানুষ স্বাধীনভাবে সমান মর্যাদা নিয়ে জন্মগ্রহণ করে।",
    "மனிதப் பிறவியினர் சகலரும் சுதந்திரமாகவே பிறக்கின்றனர்.",
    "มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกัน",
    "人人生而自由，在尊严和权利上一律平等。",
    "すべての人間は、生まれながらにして自由であり、尊厳と権利について平等である。",
    "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다.",
    "def area(r):\n    return 3.14159 * r ** 2  # m², {'r': [1, 2]}",
    "On 2026-11-29 at 07:05 it cost 1 234 567,89; call +49 (0)30 123-456.",
    "ˈfoʊnɪm, ʃ and θ; www.example.org/a_b?c=d&e#f",
)


def save_tokenizer(tokenizer: Tokenizer, vocabulary: Vocabulary, form: str, folder: Path) -> Message:
    """Write a tokenizer into an exported folder: for transformers.js as `tokenizer.json`, else as it was.

    Returns:
        what becomes of its ids there: kinds of texts that get others.
    """
    if form in ("onnx", "web"):
        shares = differing_kinds(tokenizer, save_as_json(tokenizer, folder))
        if shares:
            return say("tokenizer.json gives other ids to: {kinds}", kinds=described(shares))
        return say("tokenizer.json gives the same ids to {count} texts", count=sum(map(len, texts_by_kind().values())))
    tokenizer.save(folder)
    if form == "gguf":
        shares = unknown_kinds(tokenizer, vocabulary)
        if shares:
            return say("llama.cpp reads unknown tokens in: {kinds}", kinds=described(shares))
        return say("in the file")
    if isinstance(tokenizer.backend, LibraryBackend):  # Published ones may have other files.
        (folder / TOKENIZER_FILE).write_bytes(tokenizer.backend.serialized())
    return say("unchanged")


def save_as_json(tokenizer: Tokenizer, folder: Path) -> Tokenizer:
    """Write a tokenizer into a folder, as a `tokenizer.json` that transformers.js reads, whatever it was read from.

    Returns:
        the tokenizer as it was written.
    Raises:
        UserError: a package is missing that reads SentencePiece models.
    """
    tokenizer.save(folder)
    if isinstance(tokenizer.backend, LibraryBackend):
        content = json.loads(tokenizer.backend.serialized())
    else:
        content = json.loads(_of_sentencepiece(tokenizer.backend, tokenizer.names["eos_token"]).to_str())
    has_fallback = content["model"]["type"] == "Unigram" and content["model"].get("byte_fallback")
    if has_fallback:
        _spell_in_letters(content)
    elif (folder / TOKENIZER_FILE).is_file():
        return tokenizer
    backend = LibraryTokenizer.from_str(json.dumps(content))
    written = Tokenizer(Published(LibraryBackend(backend), names=tokenizer.names))
    written.template = tokenizer.template
    written.save(folder)
    return written


def texts_by_kind() -> Mapping[str, Sequence[str]]:
    """Texts over which ids are compared, by what is special about them."""
    return {
        say("plain text"): SENTENCES,
        say("odd spacing"): [" " + text.replace(" ", "  ", 3).replace(",", "\t") + "\n\n" for text in SENTENCES],
        say("other spaces and line ends"): [
            text.replace(" ", space) for text, space in _in_turn("\u00a0\u3000\u2009\r\x0b\u2028\u1680\u202f")
        ],
        say("decomposed letters"): [unicodedata.normalize("NFD", text) for text in SENTENCES],
        say("full-width letters and ligatures"): [_widened(text) for text in SENTENCES],
        say("emoji and rare letters"): [f"{text} {letter}{letter}" for text, letter in _in_turn(RARE)],
        say("control characters"): [
            text[:9] + letter + text[9:]
            for text, letter in _in_turn("\x00\x07\x1b\x7f\x85\u200b\u200d\u200e\ufeff\ufffd")
        ],
        say("characters that tokenizers reserve"): [
            f"{sign} {text}{sign}a" for text, sign in _in_turn(["▁", "<0x41>", "Ġ", "</s", "<extra_id_", "##"])
        ],
        say("sentinels"): [text.replace(" ", " <extra_id_0> ", 1) + "<extra_id_1>" for text in SENTENCES],
    }


def differing_kinds(tokenizer: Tokenizer, other: Tokenizer) -> Mapping[str, float]:
    """Kinds of texts to which two tokenizers give different ids, and in what share of their texts."""
    shares = {}
    for kind, texts in texts_by_kind().items():
        pairs = zip(tokenizer.encode_prompts(texts), other.encode_prompts(texts), strict=True)
        count = sum(ids.tolist() != other_ids.tolist() for ids, other_ids in pairs)
        if count:
            shares[kind] = count / len(texts)
    return shares


def unknown_kinds(tokenizer: Tokenizer, vocabulary: Vocabulary) -> Mapping[str, float]:
    """Kinds of texts that a Unigram vocabulary spells in bytes, and in what share of their texts: llama.cpp reads
    unknown tokens there.
    """
    byte_ids = [number for number, piece in enumerate(vocabulary.pieces) if piece.kind == "byte"]
    shares = {}
    for kind, texts in texts_by_kind().items():
        count = sum(np.isin(byte_ids, ids).any() for ids in tokenizer.encode_prompts(texts))
        if count and vocabulary.model == "Unigram":
            shares[kind] = count / len(texts)
    return shares


def described(shares: Mapping[str, float]) -> Message:
    """Kinds of texts with their shares: `emoji and rare letters (100%), control characters (8%)`."""
    return join(", ", [say("{kind} ({share})", kind=kind, share=f"{share:.0%}") for kind, share in shares.items()])


def _in_turn(letters: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The sentences, each with one of the letters."""
    return zip(SENTENCES, cycle(letters), strict=False)


def _widened(text: str) -> str:
    """Every second word of a text in full width, and ligatures in the others."""
    wide = {code: code + 0xFEE0 for code in range(0x21, 0x7F)}
    words = [word.replace("e", "ﬁ①½") for word in text.split(" ")]
    words[::2] = [word.translate(wide) for word in text.split(" ")[::2]]
    return " ".join(words)


def _spell_in_letters(content: dict[str, Any]) -> None:
    """Let a Unigram vocabulary spell what it lacks by pieces of one byte, in the letters of byte-level tokenizers:
    transformers.js knows no other way.
    """
    letters = byte_letters()
    model = content["model"]
    special = {token["content"] for token in content["added_tokens"]}
    texts = {
        text: "".join(letters[byte] for byte in text.encode()) for text, _ in model["vocab"] if text not in special
    }
    spelled = {*texts.values()}
    for byte, letter in enumerate(letters):
        # No text needs this piece where its letter is one already; it then has a blank before it, which
        # no letter has.
        texts[f"<0x{byte:02X}>"] = f" {letter}" if letter in spelled else letter
    model["vocab"] = [[texts.get(text, text), score] for text, score in model["vocab"]]
    model["byte_fallback"] = False
    in_letters = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    splits = [content["pre_tokenizer"]] if content["pre_tokenizer"] else []
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*splits, in_letters]}
    steps = content["decoder"].get("decoders", [content["decoder"]]) if content["decoder"] else []
    other_steps = [step for step in steps if step["type"] not in ("ByteFallback", "Fuse")]
    without_blank = {"type": "Replace", "pattern": {"String": " "}, "content": ""}
    content["decoder"] = {"type": "Sequence", "decoders": [without_blank, in_letters, *other_steps]}


def _of_sentencepiece(backend: SentencePieceBackend, eos: str) -> LibraryTokenizer:
    proto = needs("protobuf", "--model with spiece.model", module="sentencepiece.sentencepiece_model_pb2")
    file = proto.ModelProto.FromString(backend.serialized())
    added = backend.added_tokens()
    pieces = [backend.id_to_token(number) or f"[PAD{number}]" for number in range(backend.size)]
    own_symbols = [piece.piece for piece in file.pieces if piece.type == USER_DEFINED]
    is_bpe = file.trainer_spec.model_type == file.trainer_spec.BPE
    library = LibraryTokenizer(_bpe(file, pieces, bool(own_symbols)) if is_bpe else _unigram(file, pieces))
    library.normalizer = _normalizer(file.normalizer_spec, backend.legacy, own_symbols)
    scheme = "always" if backend.legacy else "first"
    if not (file.normalizer_spec.add_dummy_prefix and file.normalizer_spec.remove_extra_whitespaces):
        scheme = "never"  # The normalizer puts the blank, if any, before a text that begins with blanks too.
    blanks = pre_tokenizers.Metaspace(BLANK, scheme, split=False)
    library.pre_tokenizer = blanks
    if is_bpe and own_symbols:
        longest_first = "|".join(map(re.escape, sorted(own_symbols, key=len, reverse=True)))
        split = pre_tokenizers.Split(Regex(longest_first), "isolated")
        library.pre_tokenizer = pre_tokenizers.Sequence([blanks, split])
    steps = [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    library.decoder = decoders.Sequence(steps)
    library.add_tokens(sorted(added.values(), key=lambda token: not token.special))
    end_with(library, eos)
    return library


def _unigram(file: Any, pieces: Sequence[str]) -> models.Unigram:
    scores = [piece.score for piece in file.pieces if piece.type == NORMAL]
    never = NEVER * min(scores)
    entries = [(text, 0.0) for text in pieces]
    for number, piece in enumerate(file.pieces):
        score = piece.score
        if piece.type == USER_DEFINED:  # SentencePiece prefers these to what else could stand there.
            score = max(scores) * len(piece.piece.encode()) - 0.1
        elif piece.type != NORMAL:  # No text is split into them.
            score = never
        entries[number] = (pieces[number], score)
    return models.Unigram(entries, file.trainer_spec.unk_id, file.trainer_spec.byte_fallback)


def _bpe(file: Any, pieces: Sequence[str], has_own_symbols: bool) -> models.BPE:
    """SentencePiece joins the pair whose piece has the highest score: all pairs of the best piece, then of the next."""
    normal = {piece.piece: piece.score for piece in file.pieces if piece.type == NORMAL}
    merges = []
    for text in sorted(normal, key=lambda text: -normal[text]):
        pairs = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
        merges += [pair for pair in pairs if normal.keys() >= {*pair}]
    return models.BPE(
        {text: number for number, text in enumerate(pieces)},
        merges,
        unk_token=pieces[file.trainer_spec.unk_id],
        fuse_unk=True,
        byte_fallback=file.trainer_spec.byte_fallback,
        ignore_merges=has_own_symbols,
    )


def _normalizer(spec: Any, legacy: bool, own_symbols: Sequence[str]) -> normalizers.Normalizer:
    steps: list[normalizers.Normalizer] = []
    if spec.precompiled_charsmap:
        table = normalizers.Precompiled(spec.precompiled_charsmap)
        # The library and transformers.js seek sequences of letters in the table by other rules, and the latter not even
        # in this table: what Unicode's own form does alike everywhere is done before.
        is_compatible = table.normalize_str(COMPATIBLE) == unicodedata.normalize("NFKC", COMPATIBLE)
        form = normalizers.NFKC() if is_compatible else normalizers.NFC()
        # SentencePiece leaves its own symbols as they are, and what stands in its table: letters of private use stand
        # for them meanwhile.
        whole = normalizers.Sequence([form, table])
        preserved = [symbol for symbol in own_symbols if whole.normalize_str(symbol) != symbol]
        preserved += [sign for sign in OTHERWISE_IN_JS if table.normalize_str(sign) == sign]
        letters = {symbol: chr(PRIVATE_USE + number) for number, symbol in enumerate(preserved)}
        steps += [normalizers.Replace(symbol, letter) for symbol, letter in letters.items()]
        steps += [form, table]
        steps += [normalizers.Replace(letter, symbol) for symbol, letter in letters.items()]
    if spec.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
        steps.append(normalizers.Replace(Regex(f" +{LAST}"), ""))
        if legacy:
            steps.append(normalizers.Replace(Regex(f"{FIRST} +"), ""))
    elif spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(BLANK))
    return normalizers.Sequence(steps)
