"""The command ``warren chat``: a conversation with a model in the terminal."""

import json
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from cli.options import DEFAULT_URL, ApiKeyFile, ApiKeyOption, chosen_key
from cli.runtime import needs
from cli.terminal import notices, output
from shared.errors import ModelNotFound, PermissionDenied, StartupError, WarrenError
from shared.printable import escape_controls, printable
from shared.settings import did_you_mean

if TYPE_CHECKING:
    from cli.chat.conversation import Conversation, ModelServer

_HISTORY = Path("~/.local/state/warren/chat_history")
_COMMANDS = {
    "/help": "show this list",
    "/model": "list the models; /model NAME continues with another one",
    "/system": "show the system prompt; /system TEXT sets it, /system - removes it",
    "/clear": "forget the conversation, but not the system prompt",
    "/save": "/save FILE writes the conversation: as Markdown to FILE.md, otherwise as JSON",
    "/exit": "leave; so does Ctrl-D",
}

Read = Callable[[], str]
"""Return the next question, which may have several lines. Raises `EOFError` after the last
question, and `KeyboardInterrupt`."""


def chat(
    url: Annotated[
        str, typer.Option(help="Base URL of an OpenAI-compatible server, with or without /v1.")
    ] = DEFAULT_URL,
    model: Annotated[
        str | None,
        typer.Option(help="Model to chat with. Default: the first model that the server lists."),
    ] = None,
    system: Annotated[str, typer.Option(help="System prompt.")] = "",
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.")] = 0.7,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Maximum number of tokens of an answer. Default: chosen by the server."
        ),
    ] = None,
    api_key: ApiKeyOption = None,
    api_key_file: ApiKeyFile = None,
    history: Annotated[
        Path, typer.Option(help="File of earlier questions, which the arrow keys recall.")
    ] = _HISTORY,
) -> None:
    """Chat with a model in the terminal.

    warren chat --url http://127.0.0.1:8000
    """
    with needs("gateway"):
        from cli.chat.conversation import Conversation, ModelServer

    with closing(ModelServer(url, chosen_key(api_key, api_key_file))) as server:
        conversation = Conversation(
            server, chosen(server, model), temperature, system, max_tokens=max_tokens
        )
        is_typed = sys.stdin.isatty()
        read = _prompt(history.expanduser()) if is_typed else _line
        # Piped output contains the answers only.
        notes = output if output.is_terminal else notices
        talk = Chat(server, conversation, read, output, notes)
        talk.run()
        if talk.has_failed and not is_typed:
            raise typer.Exit(1)


def chosen(server: "ModelServer", model: str | None) -> str:
    """The model to chat with: ``model``, or the first model that the server lists.

    Raises `ModelNotFound`, which lists the models, if a gateway lists others only, and
    `StartupError` if there is none.
    """
    try:
        listed = server.models()
    except PermissionDenied:
        if model is None:
            raise
        return model
    if model is None and not listed:
        raise StartupError(f"the server at {server.url} serves no model yet")
    if model is None:
        return listed[0]
    # Without any worker the gateway may know the model all the same; other servers list not all.
    if model in listed or not listed or not server.is_warren:
        return model
    problem = f"{model} is not served at {server.url}{did_you_mean(model, listed)}"
    raise ModelNotFound("\n".join([problem, "It serves these models:", *map(printable, listed)]))


class Chat:
    """A conversation that is read from ``read``.

    Answers are shown on ``console``, everything else on ``notes``.
    """

    def __init__(
        self,
        server: "ModelServer",
        conversation: "Conversation",
        read: Read,
        console: Console,
        notes: Console,
    ) -> None:
        self._server = server
        self._conversation = conversation
        self._read = read
        self._console = console
        self._notes = notes
        self.has_failed = False
        """Whether a question was answered with an error."""
        server.on_lost = lambda: self._note("\n[the connection was lost; continuing ...]")

    def run(self) -> None:
        """Answer until the user leaves."""
        self._note(f"{printable(self._conversation.model)} is ready. /help lists the commands.\n")
        while True:
            try:
                text = self._read().strip()
            except KeyboardInterrupt:
                continue
            except EOFError:
                return
            if text == "/exit":
                return
            if text.startswith("/"):
                self._obey(text)
            elif text:
                self._answer(text)

    def _answer(self, question: str) -> None:
        from cli.chat.conversation import show_answer

        if self._console.is_terminal:
            name = escape(printable(self._conversation.model))
            self._console.print(f"[bold green]{name}[/]  ", end="")
        num_messages = len(self._conversation.messages)
        try:
            show_answer(self._conversation, question, self._console)
        except KeyboardInterrupt:
            has_answer = len(self._conversation.messages) > num_messages
            self._note("\nstopped" if has_answer else "\nstopped; the question is forgotten")
        except WarrenError as error:
            self.has_failed = True
            self._note(f"\n{error.code}: {error.message}", style="red")
        self._console.print()

    def _obey(self, text: str) -> None:
        command, _, argument = text.partition(" ")
        argument = argument.strip()
        try:
            match command:
                case "/help":
                    self._help()
                case "/model":
                    self._model(argument)
                case "/system":
                    self._system(argument)
                case "/clear":
                    self._conversation.messages.clear()
                    self._note("The conversation is forgotten.\n")
                case "/save":
                    self._save(argument)
                case _:
                    hint = did_you_mean(command, _COMMANDS) or "; /help lists the commands"
                    self._note(f"unknown command {command}{hint}\n", style="red")
        except (WarrenError, OSError) as error:
            self._note(f"{error}\n", style="red")

    def _help(self) -> None:
        for command, meaning in _COMMANDS.items():
            self._note(f"{command:8} {meaning}")
        self._note(
            "Ctrl-C stops an answer. Alt-Enter begins a new line; pasted lines are one question.\n"
        )

    def _model(self, name: str) -> None:
        listed = self._server.models()
        if not name:
            for model in listed:
                mark = "*" if model == self._conversation.model else " "
                self._note(f"{mark} {printable(model)}")
        elif name in listed:
            self._conversation.model = name
            self._note(f"{name} answers from now on.")
        else:
            hint = did_you_mean(name, listed)
            self._note(f"{name} is not served{hint}", style="red")
        self._note("")

    def _system(self, text: str) -> None:
        if text:
            self._conversation.system = "" if text == "-" else text
        self._note(f"System prompt: {self._conversation.system or 'none'}\n")

    def _save(self, name: str) -> None:
        if not name:
            self._note("Name a file: /save FILE\n", style="red")
            return
        path, prompt = Path(name).expanduser(), self._conversation.prompt
        if path.suffix == ".md":
            text = "".join(f"**{one['role']}**\n\n{one['content']}\n\n" for one in prompt)
        else:
            model = self._conversation.model
            text = json.dumps({"model": model, "messages": prompt}, indent=2, ensure_ascii=False)
        try:
            with path.open("x", encoding="utf-8") as file:  # never replaces a file
                file.write(f"{text.rstrip()}\n")
        except OSError as error:
            self._note(f"{path} cannot be written: {error.strerror}\n", style="red")
            return
        self._note(f"{len(self._conversation.messages)} messages are in {path}.\n")

    def _note(self, text: str, style: str = "dim") -> None:
        text = escape_controls(text)
        self._notes.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def _line() -> str:
    """A line of standard input that is not a terminal."""
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line


def _prompt(history: Path) -> Read:
    """A prompt with line editing, history and completion; pasted lines are a single question."""
    with needs("gateway"):
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.formatted_text import HTML
        from prompt_toolkit.history import FileHistory, InMemoryHistory
        from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
        from prompt_toolkit.output import create_output

    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    try:
        history.parent.mkdir(parents=True, exist_ok=True)
        history.touch(mode=0o600)
    except OSError:  # such as a read-only home
        kept: FileHistory | InMemoryHistory = InMemoryHistory()
    else:
        kept = FileHistory(history)
    session: PromptSession[str] = PromptSession(
        HTML("<b><ansicyan>you</ansicyan></b>  "),
        history=kept,
        key_bindings=keys,
        multiline=True,
        completer=WordCompleter([*_COMMANDS], sentence=True),
        complete_while_typing=False,
        output=create_output(always_prefer_tty=True),  # a pipe gets the answers only
    )
    return session.prompt
