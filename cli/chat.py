"""The command ``warren chat``."""

from typing import Annotated

import typer

from cli.runtime import needs
from cli.terminal import output

DEFAULT_URL = "http://127.0.0.1:8000"


def chat(
    url: Annotated[
        str, typer.Option(help="Base URL of an OpenAI-compatible server.")
    ] = DEFAULT_URL,
    model: Annotated[
        str | None,
        typer.Option(help="Model to chat with. Default: the first model that the server lists."),
    ] = None,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.")] = 0.7,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="OPENAI_API_KEY", help="API key, if the server requires one."),
    ] = None,
) -> None:
    """Chat with a model in the terminal.

    [dim]warren chat --url http://127.0.0.1:8000[/]
    """
    with needs("gateway"):
        from cli.conversation import Conversation, connect, converse, first_model

    with connect(url, api_key) as client:
        converse(Conversation(client, model or first_model(client), temperature), output)
