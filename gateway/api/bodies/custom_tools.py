"""Custom tools of a body: a custom tool takes a text, and the model calls it as a function with a
single string argument."""

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

from gateway.api.bodies.parsing import check_length, refused
from shared.messages import Tool
from shared.messages.fields import Name, Text

INPUT = "input"
"""The only parameter of the function."""
ToolName: TypeAlias = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,256}\Z")]


class InputGrammar(Struct, frozen=True, kw_only=True):
    syntax: Literal["lark", "regex"]
    definition: Text


class AnyInput(Struct, frozen=True, tag="text"):
    """Any text."""


class BoundInput(Struct, frozen=True, kw_only=True, tag="grammar"):
    """Text of a grammar, which is an object of its own in a chat."""

    grammar: InputGrammar | None = None
    syntax: Literal["lark", "regex"] | None = None
    definition: Text | None = None

    def said(self, path: str) -> InputGrammar:
        """Raises `InvalidRequest`."""
        if self.grammar is not None:
            return self.grammar
        if self.syntax is None or self.definition is None:
            raise refused(path, "expected syntax and definition of a grammar.")
        return InputGrammar(syntax=self.syntax, definition=self.definition)


class CustomDefinition(Struct, frozen=True, kw_only=True):
    name: ToolName
    description: Text | None = None
    format: AnyInput | BoundInput | None = None

    def tool(self, path: str) -> Tool:
        """The function in the prompt; ``path`` is the path of the format in the body.

        A regular expression binds the input, a Lark grammar is described to the model. Raises
        `InvalidRequest`.
        """
        described = [self.description] if self.description else []
        schema = {"type": "string"}
        if isinstance(self.format, BoundInput):
            grammar = self.format.said(path)
            if grammar.syntax == "regex":
                schema["pattern"] = f"^(?:{grammar.definition})$"
            else:
                described.append(f"The input matches this Lark grammar:\n{grammar.definition}")
        description = "\n\n".join(described)
        check_length(len(description), path)
        return Tool(
            name=self.name,
            description=description or None,
            parameters={"type": "object", "properties": {INPUT: schema}, "required": [INPUT]},
        )


class CalledCustom(Struct, frozen=True, kw_only=True):
    """A call that the assistant made earlier."""

    name: Name
    input: Text
