"""How are the chat templates of published tokenizers read, rendered and written? As Jinja, in a sandbox.

A tokenizer's `chat_template` turns messages into the text that a model was trained with. It is code of strangers: it is run in
Jinja's sandbox, which lets it neither import nor reach into Python, and what it does is counted (`jinja_bounds`). Templates of our own are written the same way, so that
`AutoTokenizer.apply_chat_template` says the words that training used.

Source: Hugging Face, "Chat templates"; Jinja, "Sandbox".
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from bounded import read_text
from settings.fields import UserError

FILES = ("chat_template.jinja", "tokenizer_config.json")
KEY = "chat_template"
Messages = Sequence[Mapping[str, str]]


def render(source: str, messages: Messages) -> str:
    """The encoder's text for messages with `role` and `content`, the last of which is to be answered.

    Raises:
        UserError: the template is broken, or refuses these messages.
    """
    try:
        text = _compiled(source)(
            messages=list(messages),
            add_generation_prompt=True,
            bos_token="",
            eos_token="</s>",
            tools=None,
            documents=None,
        )
    except Exception as error:  # it is the template that fails, in whatever way its writer thought of
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"chat_template: cannot word these turns ({reason}); name another with --prompt_template=plain"
        ) from None
    return str(text)


@cache
def _compiled(source: str) -> Any:
    from jinja2 import TemplateError

    from data.text.jinja_bounds import BoundedEnvironment, bounded

    def refuse(message: str) -> str:
        raise TemplateError(message)

    environment = BoundedEnvironment()
    environment.globals["raise_exception"] = refuse
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False}
    return bounded(environment, source)


def is_jinja(text: str) -> bool:
    """Whether a text is such a template, and no text with {prompt} in it."""
    return "{%" in text or "{{" in text


def read_chat_template(folder: str | Path) -> str | None:
    """The chat template of a tokenizer's folder; of several the one called default. None where there is none.

    Raises:
        UserError: a file cannot be read.
    """
    for name in FILES:
        path = Path(folder) / name
        try:
            text = read_text(path)
            found = text if path.suffix == ".jinja" else json.loads(text).get(KEY)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise UserError(f"{path}: cannot be read ({error}); copy the folder again") from None
        if isinstance(found, list):
            named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
            found = named.get("default")
        if isinstance(found, str) and found.strip():
            return found
    return None


def as_jinja(before: str, after: str, before_with_rules: str, after_with_rules: str, prefix: str) -> str:
    """The same words as a text with {prompt} in it gives, as Jinja.

    Args:
        before, after: what stands around a prompt; with_rules: the same where {system} is filled in. prefix: before everything.
    """
    ends_open = not after
    glue = '"" if ns.last in " \\n\\t\\r" and ns.last else "\\n"' if ends_open else _literal(_glue(after))
    return "".join(
        [
            '{%- set ns = namespace(rules="", last="") -%}',
            '{%- for m in messages if m["role"] == "system" -%}',
            '{%- set ns.rules = ns.rules + ("\\n" if ns.rules else "") + m["content"] -%}{%- endfor -%}',
            f"{{{{- {_literal(prefix)} -}}}}",
            '{%- for m in messages if m["role"] != "system" -%}{%- if m["role"] == "user" -%}',
            f'{{%- if ns.rules -%}}{{{{- {_with_rules(before_with_rules)} + m["content"] + {_with_rules(after_with_rules)} -}}}}',
            f'{{%- else -%}}{{{{- {_literal(before)} + m["content"] + {_literal(after)} -}}}}{{%- endif -%}}',
            '{%- set ns.rules = "" -%}{%- set ns.last = m["content"][-1:] -%}',
            f'{{%- else -%}}{{{{- ({glue}) + m["content"] + "\\n" -}}}}{{%- endif -%}}{{%- endfor -%}}',
        ]
    )


def _glue(after: str) -> str:
    """What is between a question and its answer in the turns before, where something stands behind the question."""
    return "" if after[-1].isspace() or not after[-1].isascii() else " "


def _with_rules(text: str) -> str:
    return " + ns.rules + ".join(map(_literal, text.split("{system}")))


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
