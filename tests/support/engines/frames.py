"""What real servers answer to the requests of a worker, recorded:

    python -m tests.support.engines.frames vllm vllm

The arguments are the value of ``--engine`` and the server, whose program is found as for ``make
engines``. The first line of a file has the server's version and its command. Each other line is a
case of `CASES`: the request, and the events of its answer.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
from msgspec import Struct

from shared.messages import Constraint, SamplingParams
from tests.support.deployment.processes import ROOT, free_port
from tests.support.engines.real_servers import RealEngine, real_engines, real_text_engines
from worker.checkpoints import store
from worker.engine.interface import SequenceId, Submit
from worker.engines.adapter import EngineTraits
from worker.engines.adapters import ADAPTERS
from worker.engines.remote_sequence import RemoteSequence
from worker.engines.start_up import EngineOptions, open_engine
from worker.text import Tokenizer

DIRECTORY = ROOT / "tests/worker/engines/frames"
END_ID = 2
"""SmolLM2's <|im_end|>."""
_MAX_SEQ_LEN = 512
_FRANCE = "The capital of France is"
_HEDGEHOGS = "🦔🦔🦔🦔🦔🦔"
_TOWARDS_THE_END = {END_ID: 100.0}


class Server(Struct, frozen=True, kw_only=True):
    """What was recorded."""

    engine: str
    version: str
    command: str


class Exchange(Struct, frozen=True, kw_only=True):
    case: str
    path: str
    body: dict[str, Any]
    events: list[dict[str, Any]]


class Case(Struct, frozen=True, kw_only=True):
    """A request of a worker that continues a text."""

    sampling: SamplingParams
    prompt: str = _FRANCE

    def fits(self, traits: EngineTraits) -> bool:
        """Whether the engine applies all of the parameters, or the worker does so in its stead with
        a short request."""
        usual = SamplingParams()
        names = [
            name
            for name in SamplingParams.__struct_fields__
            if getattr(self.sampling, name) != getattr(usual, name)
        ]
        constraint = self.sampling.constraint
        return (
            all(traits.can(name) for name in names)
            and ("allowed_token_ids" not in names or "allowed_token_ids" in traits.parameters)
            and (constraint is None or constraint.kind in traits.constraints)
        )

    def sequence(self, traits: EngineTraits, tokenizer: Tokenizer) -> RemoteSequence:
        submit = Submit(
            SequenceId("recorded", 0),
            tokenizer.encode_text(self.prompt),
            self.sampling,
            seed=7,
            max_tokens=self.sampling.max_tokens or 0,
            eos_ids=tokenizer.eos_ids,
            scores_prompt=self.sampling.prompt_logprobs is not None,
            allowed=_mask(self.sampling.allowed_token_ids, tokenizer),
        )
        return RemoteSequence(submit, traits, vocab_size=tokenizer.vocab_size, arrival=0)


def _case(max_tokens: int, prompt: str = _FRANCE, **sampling: Any) -> Case:
    fields = {"temperature": 0.0, "max_tokens": max_tokens, **sampling}
    return Case(sampling=SamplingParams(**fields), prompt=prompt)


CASES: Mapping[str, Case] = {
    "greedy": _case(12),
    "sampled": _case(12, temperature=1.0, top_p=0.9, frequency_penalty=0.5),
    "the most likely tokens": _case(12, temperature=1.0, top_k=5, min_p=0.05),
    "a repetition penalty": _case(12, repetition_penalty=1.3),
    "a token": _case(1),
    "three tokens": _case(3, _HEDGEHOGS),
    "characters in pieces": _case(14, _HEDGEHOGS),
    "letters": _case(14, "Привет, мир! Привет,"),
    "without an end": _case(14, "<|im_start|>assistant\nYes.<|im_end|>\n", ignore_eos=True),
    "logprobs": _case(6, logprobs=2),
    "logprobs of the drawn tokens": _case(6, logprobs=0),
    "logprobs of pieces": _case(14, _HEDGEHOGS, logprobs=1),
    "logprobs of three pieces": _case(3, _HEDGEHOGS, logprobs=1),
    "logprobs of the prompt": _case(1, prompt_logprobs=1),
    "an end at once": _case(12, logit_bias=_TOWARDS_THE_END),
    "an end after some tokens": _case(
        60, "<|im_start|>user\nSay yes.<|im_end|>\n<|im_start|>assistant\n"
    ),
    "a minimum": _case(12, logit_bias=_TOWARDS_THE_END, min_tokens=6),
    "a stop token": _case(12, stop_token_ids=(28, 30)),
    "allowed tokens": _case(6, allowed_token_ids=(28, 339, 260)),
    "a schema": _case(
        40, constraint=Constraint(kind="json_schema", source='{"enum": ["red", "blue"]}')
    ),
    "an expression": _case(40, constraint=Constraint(kind="regex", source="[A-Z]{3}-[0-9]{2}")),
}


def recordings() -> Sequence[Path]:
    return sorted(DIRECTORY.glob("*.jsonl"))


def read(path: Path) -> tuple[Server, list[Exchange]]:
    head, *lines = path.read_bytes().splitlines()
    exchanges = [msgspec.json.decode(line, type=Exchange) for line in lines]
    return msgspec.json.decode(head, type=Server), exchanges


def _mask(token_ids: Sequence[int] | None, tokenizer: Tokenizer) -> bytes | None:
    if not token_ids:
        return None
    mask = bytearray(tokenizer.num_mask_bytes)
    for token_id in token_ids:
        mask[token_id // 8] |= 1 << token_id % 8
    return bytes(mask)


def _shown(text: str, engine: RealEngine, model: Path) -> str:
    """Without the directories of this machine."""
    return text.replace(engine.program, engine.server).replace(str(model), "smollm2")


def _exchanges(
    url: str, engine: str, tokenizer: Tokenizer, traits: EngineTraits
) -> Iterator[Exchange]:
    for name, case in CASES.items():
        if not case.fits(traits):
            continue
        call = ADAPTERS[engine].call(case.sequence(traits, tokenizer).next_ask(), tokenizer)
        response = httpx.post(url + call.path, json=call.body, timeout=None)
        response.raise_for_status()
        lines = response.text.splitlines()
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
        events = list(map(json.loads, data)) if data else [response.json()]
        yield Exchange(case=name, path=call.path, body=dict(call.body), events=events)


def _record(engine: RealEngine, file: Path) -> None:
    model = store.pull("smollm2", lambda stage, done, total: None)
    options = engine.options(model, free_port(), max_seq_len=_MAX_SEQ_LEN)
    url, command = options["engine_url"], options["engine_command"]
    opened = open_engine(
        EngineOptions(engine=engine.name, url=url, command=command, max_seq_len=_MAX_SEQ_LEN), model
    )
    try:
        exchanges = list(
            _exchanges(url, engine.name, opened.tokenizer, ADAPTERS[engine.name].traits)
        )
    finally:
        opened.engine.stop()
    server = Server(engine=engine.name, version=opened.version, command=command)
    lines = [msgspec.json.encode(one).decode() + "\n" for one in (server, *exchanges)]
    file.write_text(_shown("".join(lines), engine, model))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("engine", choices=sorted(ADAPTERS))
    parser.add_argument("server")
    given = parser.parse_args()
    (engine,) = (
        one
        for one in (*real_engines(), *real_text_engines())
        if (one.name, one.server) == (given.engine, given.server)
    )
    DIRECTORY.mkdir(exist_ok=True)
    _record(engine, DIRECTORY / f"{engine.label}.jsonl")


if __name__ == "__main__":
    main()
