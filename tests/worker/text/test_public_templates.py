"""SmolLM2's chat template, and the templates that ``python -m tests.system.chat_templates`` has
downloaded, render as transformers renders them."""

import io
import tarfile
from pathlib import Path

import pytest

from tests.support.text.chat_templates import CONVERSATIONS, cached_templates, verdict
from tests.system.chat_templates import compared, templates_in

JOINING = """
{%- for message in messages %}<|{{ message.role }}|>
    {%- if message.content is string %}{{ message.content }}
    {%- else %}{% for part in message.content %}[{{ part.text | trim }}]{% endfor %}
    {%- endif %}
    {%- if message.thinking is defined %}({{ message.thinking }}){% endif %}
    {%- for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}
{%- endfor %}
{%- if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}<|assistant|>{% endif %}
"""
"""It joins the parts of a message in its own way, and calls reasoning ``thinking``."""
DUMPING = "{% for message in messages %}{{ message.content }}{% endfor %}{{ tools }}"
"""It would write a list of parts as it is."""
TRIMMING = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content | trim }};{% endfor %}"
)
STRICT = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}{{ messages }}"


@pytest.mark.parametrize("label", CONVERSATIONS)
def test_a_conversation_is_rendered_as_transformers_renders_it(label: str, smollm2: Path) -> None:
    sources = {"SmolLM2": (smollm2 / "chat_template.jinja").read_text(), **cached_templates()}
    sources |= {"joining": JOINING, "trimming": TRIMMING}

    verdicts = {name: verdict(source, CONVERSATIONS[label]) for name, source in sources.items()}

    assert [name for name, found in verdicts.items() if found == "different"] == []
    assert verdicts["joining"] == "equal"


def test_what_transformers_renders_differently_is_distinguished_from_what_it_cannot() -> None:
    parts = CONVERSATIONS["parts"]

    assert verdict(JOINING, parts) == "equal"
    assert verdict(DUMPING, parts) == "incomparable"
    assert verdict(TRIMMING, CONVERSATIONS["tools"]) == "incomparable"
    assert verdict(STRICT, CONVERSATIONS["a system message"]) == "both refuse"
    assert (
        verdict("{{ messages[0].tool_calls is defined }}tools", CONVERSATIONS["tools"]) == "equal"
    )
    assert verdict("{{ range(100000000000) }}", CONVERSATIONS["a question"]) == "both refuse"


def test_a_difference_is_counted_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    source = "{{ messages[0].content if namespace(_a=1) else '' }}"

    counts = compared("mine", source)

    assert counts["different"] > 0
    assert "transformers: None" in capsys.readouterr().out


def test_only_the_templates_of_a_distribution_are_taken(tmp_path: Path) -> None:
    archive = tmp_path / "package.tar.gz"
    with tarfile.open(archive, "w:gz") as files:
        for name in ("models/templates/a.jinja", "models/templates/README.md", "other/b.jinja"):
            member = tarfile.TarInfo(f"package/vendor/llama.cpp/{name}")
            member.size = len(name)
            files.addfile(member, io.BytesIO(name.encode()))

    assert templates_in(archive) == {"a.jinja": b"models/templates/a.jinja"}
