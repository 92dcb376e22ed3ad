"""A format in which the models of a family write tool calls."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gateway.text.calls import FunctionNames
from gateway.text.pieces import Parser
from gateway.tool_formats.arguments import Arguments, json_arguments
from gateway.tool_formats.rules import Rules


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """How calls are read, how grammars let a model write calls, and what chat templates expect.

    In ``calls``, NAME stands for a function's name, and ARGUMENTS for the rule of its arguments.
    """

    parser: Callable[[FunctionNames], Parser]
    """The parser of an answer, given the names of the functions that may be called."""
    tag: str = ""
    """The opening tag; empty if there is none."""
    inside: str
    """The rule of the text after the tag: a ``call``, after which MORE stands for further calls, if
    there may be some."""
    calls: Mapping[str, str]
    """The rules of a call, with an alternative for each function: the text that its parser needs,
    because an answer may end right after a repeated call. Its tags are left out if they mean
    nothing to the parser by then."""
    more: str = ""
    """The form of each further call."""
    between: str | None = None
    """The text between a call and the next tag; None: a single tag precedes all calls."""
    entries: Rules = field(default_factory=dict)
    """Further tags."""
    arguments: Arguments = json_arguments
    after: str = ""
    """What a model may write at the end of its answer, to wait for the results of its calls."""
    untagged_parser: Callable[[FunctionNames], Parser] | None = None
    """The parser of an answer that must be calls, which then have no tag; None: the tag is written
    in such an answer, too."""
    has_special_tokens: bool = True
    """Whether tags are special tokens of the vocabularies."""
    has_other_tokens: bool = False
    """Whether further special tokens, which match no text, may stand around calls."""
    has_text_parameters: bool = False
    """Whether the parser is given the text parameters of each function, by its name."""
    numbered_id: Callable[[str, int], str] | None = None
    """The id of a call of the named function, as chat templates expect it, by the number of the
    call in its conversation, from 0. None: any id."""
    num_id_chars: int | None = None
    """The number of letters and digits that chat templates expect of an id; None: any number."""


OBJECT_CALL = {"call": r'"{\"name\":" " "? "\"NAME\"," " "? "\"arguments\":" " "? ARGUMENTS "}"'}
"""The rule of a call as a JSON object."""
