"""Adapters read what real servers sent, and scripted servers send nothing else."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.support.engines import frames
from tests.support.engines.frames import CASES, Exchange, Server
from tests.support.engines.scripted_server import events_of
from worker.engine.interface import PromptScored, StepOutput
from worker.engines.adapters import ADAPTERS
from worker.engines.remote_sequence import RemoteSequence
from worker.text import Tokenizer

RECORDED = [(path.stem, *frames.read(path)) for path in frames.recordings()]
EXCHANGES = [
    pytest.param(server, exchange, id=f"{name}: {exchange.case}")
    for name, server, exchanges in RECORDED
    for exchange in exchanges
]


def replayed(exchange: Exchange, engine: str, tokenizer: Tokenizer) -> RemoteSequence:
    """The sequence after the first of its requests; checks what it says of itself."""
    adapter = ADAPTERS[engine]
    sequence = CASES[exchange.case].sequence(adapter.traits, tokenizer)
    ask = sequence.next_ask()
    call = adapter.call(ask, tokenizer)
    for event in exchange.events:
        outputs, goes_on = sequence.take(call.read(event))
        for output in outputs:
            check(output, sequence)
        if not goes_on:
            break
    assert len(sequence.output_ids) == ask.max_tokens or not goes_on
    return sequence


def check(output: StepOutput | PromptScored, sequence: RemoteSequence) -> None:
    """A token, or a prompt, has a score if its request wants one."""
    match output:
        case StepOutput(score=score):
            assert (score is not None) == (sequence.submit.sampling.logprobs is not None)
        case PromptScored(scores=scores):
            assert len(scores) == len(sequence.submit.prompt_ids) - 1


def text_of(exchange: Exchange) -> str:
    """The text that the server sent beside the tokens."""
    choices = [event.get("choices", [event])[:1] for event in exchange.events]
    return "".join(one.get("content") or one.get("text") or "" for some in choices for one in some)


def plain(text: str, tokenizer: Tokenizer) -> str:
    """Without special tokens, which some servers leave out."""
    for entry in tokenizer.special_entries:
        text = text.replace(entry, "")
    return text


@pytest.mark.parametrize(("server", "exchange"), EXCHANGES)
def test_the_tokens_are_those_of_the_servers_text(
    server: Server, exchange: Exchange, tokenizer: Tokenizer
) -> None:
    sequence = replayed(exchange, server.engine, tokenizer)

    ends = tokenizer.eos_ids.union(sequence.submit.sampling.stop_token_ids)
    spoken = [one for one in sequence.output_ids if one not in ends]
    text = plain(tokenizer.decode(spoken), tokenizer).rstrip("\ufffd")
    assert plain(text_of(exchange), tokenizer).startswith(text)


@pytest.mark.parametrize(("server", "exchange"), EXCHANGES)
def test_the_worker_still_sends_the_recorded_request(
    server: Server, exchange: Exchange, tokenizer: Tokenizer
) -> None:
    adapter = ADAPTERS[server.engine]
    sequence = CASES[exchange.case].sequence(adapter.traits, tokenizer)
    call = adapter.call(sequence.next_ask(), tokenizer)

    known = {"model": exchange.body.get("model"), "priority": exchange.body.get("priority")}
    sent = {name: value for name, value in {**call.body, **known}.items() if value is not None}
    recorded = {name: value for name, value in exchange.body.items() if value is not None}
    assert (call.path, sent) == (exchange.path, recorded)


def test_every_case_that_an_engine_can_run_is_recorded() -> None:
    for name, server, exchanges in RECORDED:
        traits = ADAPTERS[server.engine].traits
        fitting = [case for case, one in CASES.items() if one.fits(traits)]

        assert [exchange.case for exchange in exchanges] == fitting, name


def fields_of(value: Any, path: str = "") -> set[str]:
    """The fields of an event. Fields that are named after tokens count as one."""
    if isinstance(value, Mapping):
        names = {one: "token" if one.isdecimal() or ":" in one else one for one in value}
        inner = [fields_of(one, f"{path}.{names[name]}") for name, one in value.items()]
        return {f"{path}.{name}" for name in names.values()}.union(*inner)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return set[str]().union(*(fields_of(one, f"{path}[]") for one in value))
    return set()


@pytest.mark.parametrize(("name", "server", "exchanges"), RECORDED, ids=lambda one: str(one)[:20])
def test_a_scripted_server_sends_fields_that_the_real_server_sends(
    name: str, server: Server, exchanges: Sequence[Exchange], tokenizer: Tokenizer
) -> None:
    recorded = {exchange.case: exchange for exchange in exchanges}
    for case, exchange in recorded.items():
        scripted = events_of(server.engine, dict(exchange.body), tokenizer)

        assert fields_of(list(scripted)) <= fields_of(exchange.events), (name, case)
