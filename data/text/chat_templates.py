"""The chat templates of tokenizers, in Jinja: read, rendered as transformers renders them, and written.

A tokenizer's `chat_template` turns messages into the text that a model was trained with. It may use the tokenizer's
special tokens by their names. It is code of strangers and is run in a sandbox (`jinja_sandbox`). Templates of our own
are written the same way, so that `AutoTokenizer.apply_chat_template` says the words that training used.

Source: Hugging Face, "Chat templates"; transformers, `PreTrainedTokenizerBase.special_tokens_map`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from data.text.cells import json_object
from settings.errors import UserError, reason_of
from support.storage import read_text

NAMES_FILES = ("tokenizer_config.json", "special_tokens_map.json")  # the second is read where the first is an old one
# The special tokens of a folder that names none:
T5_TOKENS = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
Messages = Sequence[Mapping[str, str]]
_tried: set[str] = set()  # templates that have rendered once in a child process


def render(source: str, messages: Messages, tokens: Mapping[str, str] = T5_TOKENS) -> str:
    """The encoder's text for messages with `role` and `content`, the last of which is to be answered.

    Args:
        tokens: special tokens by name, such as `bos_token`, as `special_tokens` reads them.
    Raises:
        UserError: the template is broken, takes too much, or refuses these messages.
    """
    from data.text.jinja_sandbox import rendered, try_in_child

    variables = {"tools": None, "documents": None, "add_generation_prompt": True, **tokens}
    try:
        if source not in _tried:
            few = [{**message, "content": message["content"][:4096]} for message in messages[:64]]
            try_in_child(source, {"messages": few, **variables})
            _tried.add(source)
        return rendered(source, {"messages": list(messages), **variables})
    except Exception as error:  # it is the template that fails, in whatever way its writer thought of
        reason = reason_of(error)
        raise UserError(
            "chat_template: cannot word these turns ({reason}); choose another with --prompt_template=plain",
            reason=reason,
        ) from None


def special_tokens(folder: str | Path) -> dict[str, str]:
    """The special tokens that a tokenizer's folder names, such as `eos_token`, as transformers takes them.

    `special_tokens_map.json` counts where `tokenizer_config.json` is of a version that lists no `added_tokens_decoder`.
    """
    tokens = dict[str, Any]()
    for file in NAMES_FILES:
        content = json_object(Path(folder) / file)
        tokens |= {name: token for name, token in content.items() if name.endswith("_token")}
        extra = content.get("extra_special_tokens")
        tokens |= extra if isinstance(extra, dict) else {}
        if "added_tokens_decoder" in content:
            break
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def read_chat_template(folder: str | Path) -> str | None:
    """The chat template of a tokenizer's folder; of several the one called default. None where there is none.

    Raises:
        UserError: a file cannot be read.
    """
    for name, template_in in FILES.items():
        path = Path(folder) / name
        try:
            template = template_in(read_text(path))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise UserError("{path}: cannot be read ({error}); copy the folder again", path=path, error=error) from None
        if isinstance(template, str) and template.strip():
            return template
    return None


def _of_config(text: str) -> object:
    template = json.loads(text).get("chat_template")
    if isinstance(template, list):
        for choice in template:
            match choice:
                case {"name": "default", "template": default}:
                    return default
    return template


FILES: dict[str, Callable[[str], object]] = {"chat_template.jinja": str, "tokenizer_config.json": _of_config}


def as_jinja(before: str, after: str, before_with_rules: str, after_with_rules: str, prefix: str) -> str:
    """The same words as a text with {prompt} in it gives, as Jinja.

    Args:
        before, after: what stands around a prompt; with_rules: the same where {system} is filled in. prefix: before
            everything.
    """
    glue = '"" if ns.last in " \\n\\t\\r" and ns.last else "\\n"'  # the end of the question decides
    if after:
        glue = _literal(separator_after(after))
    return "".join(
        [
            '{%- set ns = namespace(rules="", last="") -%}',
            '{%- for m in messages if m["role"] == "system" -%}',
            '{%- set ns.rules = ns.rules + ("\\n" if ns.rules else "") + m["content"] -%}{%- endfor -%}',
            f"{{{{- {_literal(prefix)} -}}}}",
            '{%- for m in messages if m["role"] != "system" -%}{%- if m["role"] == "user" -%}',
            f'{{%- if ns.rules -%}}{{{{- {_with_rules(before_with_rules)} + m["content"] + ',
            f"{_with_rules(after_with_rules)} -}}}}",
            f'{{%- else -%}}{{{{- {_literal(before)} + m["content"] + {_literal(after)} -}}}}{{%- endif -%}}',
            '{%- set ns.rules = "" -%}{%- set ns.last = m["content"][-1:] -%}',
            f'{{%- else -%}}{{{{- ({glue}) + m["content"] + "\\n" -}}}}{{%- endif -%}}{{%- endfor -%}}',
        ]
    )


def separator_after(text: str) -> str:
    """What is between a question that ends so and its answer, in the turns before."""
    return " " if re.search(r"[!-~]\Z", text) else ""


def _with_rules(text: str) -> str:
    return " + ns.rules + ".join(map(_literal, text.split("{system}")))


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
