"""Chat templates in Jinja: those of others are read in a sandbox, and ours are written so that others say the same."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from data.text import jinja_sandbox
from data.text.chat_templates import read_chat_template, render, special_tokens
from data.text.jinja_sandbox import rendered
from data.text.templates import ASSISTANT, SYSTEM, TEMPLATES, USER, Template, Turn, template_of
from data.tokenizers.tokenizer import Tokenizer
from data.tokenizers.training import byte_tokenizer
from settings.declared import DataConfig
from settings.errors import UserError

PUBLISHED = (
    "{% for message in messages %}{% if message['role'] == 'user' %}<U>{{ message['content'] }}</U>\n"
    "{% else %}<A>{{ message['content'] }}</A>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<A>{% endif %}"
)
TALKS: list[list[Turn]] = [
    [(USER, "你好")],
    [(SYSTEM, "be short"), (USER, 'a "quoted" question')],
    [(USER, "one "), (ASSISTANT, "two"), (USER, "three"), (ASSISTANT, "四\n五"), (USER, "six {prompt} {{ x }}")],
    [(SYSTEM, "a"), (SYSTEM, "b"), (USER, "c"), (ASSISTANT, "d"), (USER, "e")],
]
OURS = [*TEMPLATES, "Q: {prompt}\nA:", "[{prompt}] ({system})", "{prompt}\n"]


def data_settings(prompt_template: str = "auto") -> DataConfig:
    return DataConfig(prompt_template=prompt_template)


def messages(turns: list[Turn]) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in turns]


@pytest.mark.parametrize("name", OURS)
def test_ours_says_the_same_in_jinja(name: str) -> None:
    template = replace(Template.load(name, "summarize: "), has_turns=True)
    source = template.chat_template()
    assert source is not None
    for turns in TALKS:
        assert rendered(source, {"messages": messages(turns)}) == template.prompt(turns)


@pytest.mark.parametrize("file", ["chat_template.jinja", "tokenizer_config.json", "several"])
def test_the_template_of_a_folder_is_read_and_kept(tmp_path: Path, file: str) -> None:
    byte_tokenizer().save(tmp_path)
    if file == "chat_template.jinja":
        (tmp_path / file).write_text(PUBLISHED)
    else:
        several = [{"name": "tools", "template": "x"}, {"name": "default", "template": PUBLISHED}]
        config = {"chat_template": several if file == "several" else PUBLISHED}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = template_of(data_settings(), tmp_path)
    assert template_of(data_settings("chat_template"), tmp_path) == template
    assert template_of(data_settings("plain"), tmp_path) == Template()
    words = "<U>a</U>\n<A>b</A>\n<U>c</U>\n<A>"
    assert template.prompt([(USER, "a"), (ASSISTANT, "b"), (USER, "c")]) == words
    assert template.question(words) == "c"
    assert template.has_turns, "a chat template is for conversations"
    tokenizer = Tokenizer.load(tmp_path)
    tokenizer.template = template
    tokenizer.save(tmp_path / "next")
    assert template_of(data_settings(), tmp_path / "next") == template
    assert read_chat_template(tmp_path / "next") == PUBLISHED


# template -> why it is not rendered
BROKEN = {
    "{{ messages.__class__.__mro__ }}": "unsafe",
    "{% set _ = messages.append(1) %}": "unsafe",
    "{% for x in range(10**9) %}{% endfor %}": "Range too big",
    "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}": "recursion",
    "{{ a }}" * 2**20: "longer than",
    "{{ raise_exception('no system turns') }}": "no system turns",
    "{{ sep_token + 'a' }}": "undefined",
}
LARGE = "{{ 'a' * 10**10 }}"
ENDLESS = [
    "{% for x in range(99999) %}{% for y in range(99999) %}{% endfor %}{% endfor %}",
    "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
]


@pytest.mark.parametrize(("source", "reason"), BROKEN.items())
def test_strangers_reach_nothing(source: str, reason: str) -> None:
    with pytest.raises(Exception, match=reason):
        rendered(source, {"messages": messages(TALKS[0])})


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (ENDLESS[0], "takes more"),
        (LARGE, "takes more"),
        ("{{ dict.__class__.__mro__ }}", "unsafe"),
        pytest.param(ENDLESS[1], "takes more", marks=pytest.mark.slow),
    ],
)
def test_strangers_end_in_a_sentence(source: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jinja_sandbox, "TRIAL_SECONDS", 1)
    with pytest.raises(UserError, match=f"cannot word these turns .*{reason}"):
        render(source, messages(TALKS[0]))


def test_long_conversations_are_no_strangers_tricks() -> None:
    turns = messages([(USER, "some words " * 90), (ASSISTANT, "some words " * 90)] * 200)
    source = (
        "{% for m in messages %}{{ '<' ~ m.role ~ '> ' + m['content']|trim + '\n' }}{% endfor %}"
        "{{ messages|length ~ 1.5 ~ none }}"
    )
    assert render(source, turns) == "".join(f"<{m['role']}> {m['content'].strip()}\n" for m in turns) + "4001.5None"
    assert len(rendered("{{ messages[0].content * 2000 }}", {"messages": turns})) == 1024 * 1024, "no more is read"


TALK = messages([(USER, "how <far> é"), (ASSISTANT, "a mile"), (USER, "and back")])
TOKENS = {
    "eos_token": "<end>",
    "bos_token": "<s>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "image_token": "<image>",
}
EACH = "{% for m in messages %}"
# templates and their words for TALK, as transformers 5.23 gives them
TRANSFORMERS = [
    (
        EACH + "{% if m['role'] == 'assistant' %}{% generation %}A: {{ m['content'] }}\n{% endgeneration %}{% else %}"
        "Q: {{ m['content'] }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}A:{% endif %}",
        "Q: how <far> é\nA: a mile\nQ: and back\nA:",
    ),
    (EACH + "\n  {%- generation -%}\n  {{ m.role }}\n  {%- endgeneration %}\n{% endfor %}", "userassistantuser"),
    (
        EACH + "{% if loop.index > 2 %}{% break %}{% endif %}{{ m['content'] }} | {% endfor %}",
        "how <far> é | a mile | ",
    ),
    (EACH + "{{ m['content'] }}{{ eos_token }}{% endfor %}", "how <far> é<end>a mile<end>and back<end>"),
    ("  {% if true %}\n  a\n  {% endif %}\nb", "  a\nb"),
    ("{{ messages[0] | tojson }}", '{"role": "user", "content": "how <far> é"}'),
    ("{{ {'a': 'é'} | tojson(ensure_ascii=true, separators=(',', ':')) }}", '{"a":"\\u00e9"}'),
    ("{{ tools is none }}{{ add_generation_prompt }}{{ enable_thinking is defined }}", "TrueTrueFalse"),
    ("{% set ns = namespace(n=0, self=1) %}" + EACH + "{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n + ns.self }}", "4"),
    ("{{ '%s-%d' % ('a', 2) }}{{ '{:>3}'.format('b') }}{{ 'c'.center(3) }}{{ 'd'|center(3) }}", "a-2  b c  d "),
]


@pytest.mark.parametrize(("source", "text"), TRANSFORMERS)
def test_templates_are_rendered_as_transformers_renders_them(source: str, text: str) -> None:
    variables = {"messages": TALK, "tools": None, "documents": None, "add_generation_prompt": True}
    assert rendered(source, {**variables, **TOKENS}) == text


@pytest.mark.slow
def test_transformers_renders_so() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    for source, text in TRANSFORMERS:
        options = {"chat_template": source, "add_generation_prompt": True, **TOKENS}
        assert render_jinja_template([TALK], **options)[0] == [text]


ADDED = {"added_tokens_decoder": {}}


@pytest.mark.parametrize(
    ("config", "mapped", "expected"),
    [
        ({"eos_token": {"content": "<a>", "lstrip": False}}, {}, {"eos_token": "<a>"}),
        ({"eos_token": "<a>", **ADDED}, {"eos_token": "<b>", "cls_token": "<c>"}, {"eos_token": "<a>"}),
        ({"image_token": "<i>", "extra_special_tokens": {"boa": "<o>"}}, {}, {"image_token": "<i>", "boa": "<o>"}),
        ([], "text", {}),
    ],
)
def test_special_tokens_are_those_that_a_folder_names(
    tmp_path: Path, config: object, mapped: object, expected: dict[str, str]
) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(mapped))
    assert special_tokens(tmp_path) == expected


def test_a_folders_template_has_the_folders_tokens_wherever_it_is_copied(tmp_path: Path) -> None:
    byte_tokenizer().save(tmp_path)
    names = {
        "bos_token": "<s>",
        "sep_token": "<sep>",
        "chat_template": "{{ bos_token ~ messages[0].content ~ sep_token ~ eos_token }}",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    template = template_of(data_settings(), tmp_path)
    assert template.prompt([(USER, "a")]) == "<s>a<sep></s>"
    assert template.text_around_question() == ("<s>", "<sep></s>")
    (tmp_path / "next").mkdir()
    template.save(tmp_path / "next")
    assert template_of(data_settings(), tmp_path / "next") == Template.read(tmp_path / "next") == template
    own = data_settings("{{ messages[0].content ~ bos_token }}")
    for folder in (tmp_path, tmp_path / "next"):
        assert template_of(own, folder).prompt([(USER, "a")]) == "a<s>"
