"""Folders of sentence-transformers: a T5 encoder, and what makes vectors of its states; no torch.

    modules.json                        the modules in their order, each with its class and its folder
    config_sentence_transformers.json   prompts
    sentence_bert_config.json           the longest text in tokens; beside the T5, which is in the root or a folder
    1_Pooling/config.json               which tokens are pooled
    2_Dense/                            config.json, and model.safetensors with the matrix of the vectors
    3_Normalize                         nothing: the vectors get length 1

Written and read are the modules Transformer, Pooling, Dense and Normalize in this order, of which the last two may be
absent. The matrix lies in `2_Dense` alone: a second copy in the root could differ from it, and transformers would
report it as a weight that belongs to no T5.

Prompts: `query` stands before a text that documents are looked for with, and `document`, `passage` or `corpus` before a
document, as `encode_query` and `encode_document` take them. Where a folder has none of these, its default prompt, which
`encode` puts before every text, counts as both.

Source: sentence-transformers 6.2 and 3.0: classes SentenceTransformer, Transformer, Pooling, Dense
and Normalize; InstructorEmbedding 1.0.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from model.formats.checksums import is_inside
from model.shapes import EMBEDDING_HEAD
from settings.declared import DataConfig, T5ModelConfig, settings_by_name
from settings.errors import UserError, refuse
from settings.fields import parse
from settings.published_keys import CONFIG, DENSE, POOLING, TOKENIZER, VECTOR_MODEL, VECTOR_TEXTS, check_keys
from support.language import join, say
from support.storage import read_text

MODULES_FILE = "modules.json"
DENSE_FOLDER = PurePosixPath(DENSE).parent.name
# Name of the matrix in a Dense folder, and in a model of ours.
STORED_MATRIX = "linear.weight"
MATRIX = f"{EMBEDDING_HEAD}.dense.weight"
PACKAGES = ("sentence_transformers", "InstructorEmbedding", "INSTRUCTOR")
MODULES = ("Transformer", "Pooling", "Dense", "Normalize")
# Word of the setting `pooling` -> that of sentence-transformers.
POOLINGS = {"mean": "mean", "first": "cls", "last": "lasttoken"}
# Up to version 5.3, there is a key for each pooling.
POOLING_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
IDENTITY = "torch.nn.modules.linear.Identity"
DEFAULT_ACTIVATION = "torch.nn.modules.activation.Tanh"
VECTORS = "sentence_embedding"  # What modules call the vectors of texts.
DOCUMENT_PROMPTS = ("document", "passage", "corpus")


class Module(NamedTuple):
    """One module: its class, without its package, and its folder."""

    kind: str
    folder: Path


@dataclass(frozen=True)
class TextSettings:
    """How texts are read before they become vectors.

    Args:
        max_seq_len: the longest text in tokens; None: not known.
        query_prompt: before a text that documents are looked for with. document_prompt: before a document.
    """

    max_seq_len: int | None = None
    query_prompt: str | None = None
    document_prompt: str | None = None

    @classmethod
    def of(cls, data: DataConfig) -> TextSettings:
        """As these settings say."""
        return cls(data.max_seq_len, data.query_prompt, data.document_prompt)


# --- reading


def encoder_folder(folder: Path) -> Path:
    """The folder with `config.json` and the weights of the T5: `folder` itself, or that of its first module.

    Raises:
        UserError: `modules.json` is broken.
    """
    if (folder / CONFIG).is_file() or not (folder / MODULES_FILE).is_file():
        return folder
    return _modules(folder)[0].folder


def head_settings(folder: Path) -> dict[str, Any]:
    """The settings of the head that gives the vectors; empty where no modules belong to the T5 of this folder.

    Raises:
        UserError: there are modules, or settings of them, that a head has not: each with what is allowed.
    """
    root = _root(folder)
    if root is None:
        return {}
    modules = _modules(root)
    problems = list(_wrong_modules(root, modules))
    for path in (root / VECTOR_MODEL, folder / VECTOR_TEXTS):
        problems += check_keys(path, _content(path, dict, is_needed=False))
    by_kind = {module.kind: module.folder for module in modules}
    settings: dict[str, Any] = {"head": "embedding", "embedding_size": 0, "normalize": "Normalize" in by_kind}
    if "Pooling" in by_kind:
        config = _content(by_kind["Pooling"] / CONFIG, dict)
        words = {word: pooling for pooling, word in POOLINGS.items()}
        modes = _pooling_modes(config)
        settings["pooling"] = words.get("+".join(modes), "mean")
        problems += _wrong_pooling(by_kind["Pooling"] / CONFIG, modes)
    if "Dense" in by_kind:
        path = by_kind["Dense"] / CONFIG
        config = _content(path, dict)
        settings["embedding_size"] = config.get("out_features")
        problems += _wrong_dense(path, config)
    refuse(problems)
    return settings


def dense_folder(folder: Path) -> Path | None:
    """The folder with the matrix of the vectors of the T5 of this folder; None: there is none."""
    root = _root(folder)
    modules = [] if root is None else _modules(root)
    return next((module.folder for module in modules if module.kind == "Dense"), None)


def text_settings(folder: Path) -> dict[str, Any]:
    """The settings that say how texts are read: max_seq_len and prompts, as far as the folder of a T5 has them.

    Raises:
        UserError: a file is broken, or there are prompts whose tokens are not pooled.
    """
    root = _root(folder)
    if root is None:
        return {}
    prompts = _prompts(root)
    settings: dict[str, Any] = {}
    longest = _content(folder / VECTOR_TEXTS, dict, is_needed=False).get("max_seq_length")
    if longest is None:  # From version 6 on, the tokenizer says it.
        longest = _content(folder / TOKENIZER, dict, is_needed=False).get("model_max_length")
    with suppress(ValueError):  # 1e30 stands for no limit.
        settings["max_seq_len"] = parse(settings_by_name()["max_seq_len"][1], longest)
    for name, prompt in prompts.items():
        if prompt:
            settings[name] = prompt
    if any(prompts.values()):
        refuse(list(_unpooled_prompts(root)))
    return settings


def _root(folder: Path) -> Path | None:
    """The folder whose `modules.json` says that the T5 is in `folder`: that itself or the one around it."""
    for root in (folder, folder.parent):
        if (root / MODULES_FILE).is_file() and _modules(root)[0].folder == folder:
            return root
    return None


def _modules(root: Path) -> list[Module]:
    """The modules of a folder, at least one.

    Raises:
        UserError: `modules.json` is broken, or names folders elsewhere.
    """
    path = root / MODULES_FILE
    modules = []
    for entry in _content(path, list):
        match entry:
            case {"type": str(kind), "path": str(name)} if not name or is_inside(name):
                modules.append(Module(_short_kind(kind), root / name))
            case _:
                raise UserError("{path}, is damaged: it holds no list of modules; copy the folder again", path=path)
    if not modules:
        raise UserError("{path}, is damaged: it holds no list of modules; copy the folder again", path=path)
    return modules


def _short_kind(kind: str) -> str:
    """One of `MODULES` if it is one, else the whole name of its class."""
    package = kind.partition(".")[0]
    name = kind.rpartition(".")[2].removeprefix("INSTRUCTOR_")
    is_known = package in PACKAGES or kind.startswith("INSTRUCTOR_")
    return name if is_known and name in MODULES else kind


def _prompts(root: Path) -> dict[str, str]:
    """The settings query_prompt and document_prompt; empty: no prompt."""
    config = _content(root / VECTOR_MODEL, dict, is_needed=False)
    prompts = config.get("prompts") or {}
    if not isinstance(prompts, dict):
        raise UserError("{path}, is damaged: its prompts are no table; copy the folder again", path=root / VECTOR_MODEL)
    prompts = {name: str(prompt) for name, prompt in prompts.items() if prompt}
    query = prompts.get("query", "")
    document = next((prompts[name] for name in DOCUMENT_PROMPTS if name in prompts), "")
    if not query and not document:
        query = document = prompts.get(str(config.get("default_prompt_name")), "")
    return {"query_prompt": query, "document_prompt": document}


def _content(path: Path, kind: type, is_needed: bool = True) -> Any:
    """The JSON of a file, a table or a list; an empty one where the file is missing and not needed."""
    try:
        content = json.loads(read_text(path))
    except FileNotFoundError as error:
        if not is_needed:
            return kind()
        raise UserError("{path}, cannot be read: {error}", path=path, error=error) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError("{path}, cannot be read: {error}", path=path, error=error) from None
    if not isinstance(content, kind):
        raise UserError("{path}, is not the JSON that belongs there; copy or download it again", path=path)
    return content


# --- what is wrong with it


def _wrong_modules(root: Path, modules: list[Module]) -> Iterator[str]:
    """Modules of other kinds, or in another order."""
    path = root / MODULES_FILE
    kinds = [module.kind for module in modules]
    unknown = [kind for kind in kinds if kind not in MODULES]
    in_order = [kind for kind in MODULES if kind in kinds]
    allowed = join(", ", MODULES)
    if unknown:
        yield say(
            "{path}: has the module {unknown}, which is not supported here; supported: {allowed}; compute the embeddings "
            "with sentence-transformers, or train with --head=embedding from a T5",
            path=path,
            unknown=join(", ", unknown),
            allowed=allowed,
        )
    elif kinds != in_order or "Pooling" not in kinds:
        yield say(
            "{path}: has the modules {kinds}; supported: {allowed}, in this order, Dense and Normalize only if needed; "
            "compute the embeddings with sentence-transformers, or train with --head=embedding from a T5",
            path=path,
            kinds=join(", ", kinds),
            allowed=allowed,
        )


def _pooling_modes(config: Mapping[str, Any]) -> list[str]:
    """The poolings of a Pooling module, in the words of sentence-transformers."""
    named = config.get("pooling_mode")
    if named is None:
        named = [mode for key, mode in POOLING_KEYS.items() if config.get(key)] or "mean"
    return list(map(str, named)) if isinstance(named, list) else [str(named)]


def _wrong_pooling(path: Path, modes: list[str]) -> Iterator[str]:
    if modes not in [[word] for word in POOLINGS.values()]:
        yield say(
            "{path}: pooling_mode = {modes}, is not supported here; supported: one of {allowed}; compute the embeddings "
            "with sentence-transformers, or train with --head=embedding from a T5",
            path=path,
            modes=join(" + ", modes),
            allowed=join(", ", POOLINGS.values()),
        )


def _wrong_dense(path: Path, config: Mapping[str, Any]) -> Iterator[str]:
    """A Dense module that is more than a matrix."""
    allowed = {
        "bias": (config.get("bias", True), False),
        "activation_function": (config.get("activation_function", DEFAULT_ACTIVATION), IDENTITY),
        "use_residual": (config.get("use_residual", False), False),
        "module_input_name": (config.get("module_input_name") or VECTORS, VECTORS),
        "module_output_name": (config.get("module_output_name") or VECTORS, VECTORS),
    }
    for name, (value, only) in allowed.items():
        if value != only:
            yield say(
                "{path}: {name} = {value}, is not supported here; supported: {only}; compute the embeddings with "
                "sentence-transformers, or train with --head=embedding from a T5",
                path=path,
                name=name,
                value=str(value)[:60],
                only=only,
            )


def _unpooled_prompts(root: Path) -> Iterator[str]:
    """Prompts that are read and not pooled, as those of Instructor."""
    for module in _modules(root):
        if module.kind == "Pooling":
            path = module.folder / CONFIG
            if _content(path, dict).get("include_prompt", True) is False:
                yield say(
                    "{path}: include_prompt = false, excludes the prompt from pooling, which is not supported here; "
                    "remove the prompts from {model_file} to embed texts without them",
                    path=path,
                    model_file=root / VECTOR_MODEL,
                )


# --- writing


def write_modules(config: T5ModelConfig, folder: Path) -> None:
    """Write `modules.json` and what belongs to the modules but the matrix of a Dense, beside a T5 in the root.

    Types and keys are those that versions 3 to 6 read.

    Raises:
        OSError: the folder cannot be written.
    """
    width = config.d_model
    pooling = POOLINGS[config.head_pooling]
    paths = {"Transformer": "", "Pooling": PurePosixPath(POOLING).parent.name}
    modes = {key: mode == pooling for key, mode in POOLING_KEYS.items()}
    _write(folder / POOLING, {"word_embedding_dimension": width, **modes})
    if config.embedding_size:
        paths["Dense"] = DENSE_FOLDER
        dense = {
            "in_features": width,
            "out_features": config.embedding_size,
            "bias": False,
            "activation_function": IDENTITY,
        }
        _write(folder / DENSE, dense)
    if config.normalize:
        paths["Normalize"] = f"{len(paths)}_Normalize"
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, path) in enumerate(paths.items())
    ]
    _write(folder / MODULES_FILE, modules)


def write_text_settings(folder: Path, settings: TextSettings) -> None:
    """Write prompts and the longest text beside `modules.json`; nothing where there is none.

    Raises:
        OSError: the folder cannot be written.
    """
    if not (folder / MODULES_FILE).is_file():
        return
    prompts = {"query": settings.query_prompt or "", "document": settings.document_prompt or ""}
    model = {
        "model_type": "SentenceTransformer",
        "prompts": prompts,
        "default_prompt_name": None,
        "similarity_fn_name": "cosine",
    }
    _write(folder / VECTOR_MODEL, model)
    texts: dict[str, Any] = {"do_lower_case": False}
    if settings.max_seq_len is not None:
        texts["max_seq_length"] = settings.max_seq_len
    _write(folder / VECTOR_TEXTS, texts)


def _write(path: Path, content: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf8")
