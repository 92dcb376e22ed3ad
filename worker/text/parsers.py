"""Detects the formats of tool calls and reasoning from a model's chat template and vocabulary."""

from collections.abc import Mapping
from itertools import product

from msgspec.structs import replace

from shared.errors import InvalidRequest
from shared.messages import ChatMessage, ChatPrompt, ReasoningSwitch
from worker.text.chat_template import HARMONY, ChatTemplate
from worker.text.tokenizer import Tokenizer
from worker.text.written_tools import DEEPSEEK, HERMES

_BY_ENTRY: Mapping[str, str] = {"[TOOL_CALLS]": "mistral", "<|tool_call_begin|>": "kimi_k2"}
"""Formats by an entry of the vocabulary. Chat templates that only repeat earlier calls may lack it.
"""
_BY_TAG: Mapping[str, str] = {
    HARMONY: "harmony",
    DEEPSEEK: "deepseek_v3",
    "<start_function_call>": "functiongemma",
    "<|tool_call>": "gemma4",
    "<function=": "qwen3_coder",
    "<arg_key>": "glm45",
    "<tool_call>": "hermes",
    "[func_name1(": "pythonic",
    '"parameters": dictionary of argument name': "llama3_json",  # also of Llama 4
}
"""Formats by a text that their chat templates contain; the first match counts."""
_THINK_PARSERS = ("qwen3", "deepseek_r1")
"""Formats of thoughts in ``<think>``."""
_QUESTION = ChatPrompt(messages=(ChatMessage(role="user", content="?"),))
_SWITCHES = ("enable_thinking", "thinking")
"""Names that chat templates use for whether the model shall think."""


def tool_parser(tokenizer: Tokenizer, setting: str = "auto") -> str | None:
    """The format of the model's tool calls; None if it has no known format."""
    if setting != "auto":
        return None if setting == "none" else setting
    if tokenizer.template is None:
        return None
    template = tokenizer.template.for_tools
    if not template.has_tools:
        return template.written_form.parser
    for entry, parser in _BY_ENTRY.items():
        if entry in template.source or tokenizer.has_entry(entry):
            return parser
    for tag, parser in _BY_TAG.items():
        if tag in template.source:
            return parser
    if tokenizer.has_entry("<|python_tag|>"):
        return "llama3_json"
    return None


def with_known_calls(tokenizer: Tokenizer, setting: str = "auto") -> tuple[Tokenizer, str | None]:
    """The tokenizer and the format of the model's tool calls. If the template's own is unknown, the
    tokenizer writes tools into the messages."""
    parser = tool_parser(tokenizer, setting)
    if parser is not None or setting != "auto" or tokenizer.template is None:
        return tokenizer, parser
    return tokenizer.with_written_tools(), HERMES.parser


def reasoning_parser(tokenizer: Tokenizer, setting: str = "auto") -> str | None:
    """The format of the model's reasoning; None if it has no known format."""
    if setting != "auto":
        return None if setting == "none" else setting
    if tokenizer.template is None:
        return None
    if tokenizer.template.is_harmony:
        return "harmony"
    if tokenizer.has_entry("<|channel>") and tokenizer.has_entry("<channel|>"):
        return "gemma4"
    # The tag may be several tokens, as in OLMo 3, or be missing from the template.
    if not tokenizer.has_entry("</think>") and "<think>" not in tokenizer.template.source:
        return None
    return _think_parser(tokenizer.template, _QUESTION)


def reasoning_switches(tokenizer: Tokenizer, setting: str = "auto") -> tuple[ReasoningSwitch, ...]:
    """The variables of the chat template with which the model's reasoning has another format."""
    usual = reasoning_parser(tokenizer, setting)
    if setting != "auto" or tokenizer.template is None or usual not in _THINK_PARSERS:
        return ()
    switches: list[ReasoningSwitch] = []
    for variable, value in product(_SWITCHES, (False, True)):
        question = replace(_QUESTION, template_kwargs={variable: value})
        parser = _think_parser(tokenizer.template, question)
        if parser != usual:
            switches.append(ReasoningSwitch(variable=variable, value=value, parser=parser))
    return tuple(switches)


def _think_parser(template: ChatTemplate, prompt: ChatPrompt) -> str:
    """The format with the tag ``<think>``, which is the template's or the model's own."""
    try:
        text = template.render(prompt)
    except InvalidRequest:  # the template requires more than a question
        text = ""
    return "deepseek_r1" if text.rstrip().endswith("<think>") else "qwen3"
