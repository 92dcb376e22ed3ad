"""``warren verify`` and answers of SmolLM2."""

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from cli.main import app
from cli.verify.recomputation import Recomputation, Recomputed, load
from gateway.intake.receipts import ReceiptKeys, verified
from shared.messages import Provenance, Receipt
from tests.cli.verify.conftest import (
    REQUESTS,
    Answers,
    answers_of,
    asked,
    body_of,
    deployment,
)
from tests.support.engines.scripted_server import engine_server
from tests.support.receipts import keys_of
from worker.decode.served_model import ServedModel
from worker.text import Tokenizer

NAME = "sampled chat"


@pytest.fixture(scope="module")
def model(answered: Answers, smollm2: Path) -> Iterator[ServedModel]:
    """The model of the answers."""
    loaded = load(str(smollm2), receipt_of(answered, NAME))
    yield loaded
    loaded.engine.stop()


def receipt_of(answers: Answers, name: str) -> Receipt:
    return verified(answers.answers[name]["receipt"], answers.keys)


def recomputed(receipt: Receipt, body: bytes, model: ServedModel) -> Recomputed:
    recomputation = Recomputation(receipt, body, model)
    assert recomputation.problem() == ""
    return asyncio.run(recomputation.compare())


def with_choice(receipt: Receipt, **changes: Any) -> Receipt:
    choice = structs.replace(receipt.choices[0], **changes)
    return structs.replace(receipt, choices=(choice, *receipt.choices[1:]))


def verify(place: Path, document: Any, answers: Answers, *options: str) -> Result:
    receipt, keys = place / "answer.json", place / "jwks.json"
    receipt.write_text(document if isinstance(document, str) else json.dumps(document))
    keys.write_text(json.dumps(answers.keys))
    words = ["verify", str(receipt), "--keys", str(keys), *options]
    return CliRunner().invoke(app, words, catch_exceptions=False)


@pytest.mark.parametrize("name", REQUESTS)
def test_each_token_of_an_answer_is_drawn_again(
    answered: Answers, model: ServedModel, name: str
) -> None:
    receipt = receipt_of(answered, name)

    found = recomputed(receipt, answered.requests[name], model)

    num_tokens = sum(len(choice.token_ids) for choice in receipt.choices)
    assert found == Recomputed(num_tokens, [], "", "exact", found.why_not_exact)


def test_a_command_checks_an_answer_from_its_signature_to_its_tokens(
    answered: Answers, tmp_path: Path, smollm2: Path
) -> None:
    request = tmp_path / "request.json"
    request.write_bytes(answered.requests[NAME])
    options = ("--request", str(request), "--model", str(smollm2))

    done = verify(tmp_path, answered.answers[NAME], answered, *options)

    assert done.exit_code == 0, done.output
    findings = [line[:10].strip() for line in done.output.splitlines()]
    assert findings == ["signature", "request", "answer"]
    assert "is the one that this model gives: 80 tokens" in done.output


def test_a_receipt_may_be_alone_or_in_a_line_of_a_batch(answered: Answers, tmp_path: Path) -> None:
    answer = answered.answers[NAME]
    line = {"custom_id": "1", "response": {"status_code": 200, "body": answer}}

    for document in (answer["receipt"], line):
        assert verify(tmp_path, document, answered).exit_code == 0


def test_another_request_is_not_that_of_the_receipt(answered: Answers, tmp_path: Path) -> None:
    request = tmp_path / "request.json"
    request.write_bytes(answered.requests[NAME].replace(b"lighthouses", b"lighthouse"))

    done = verify(tmp_path, answered.answers[NAME], answered, "--request", str(request))

    assert done.exit_code == 1
    assert "does NOT hold" in done.output


def test_a_changed_receipt_is_named_at_its_signature(answered: Answers, tmp_path: Path) -> None:
    head, payload, signature = answered.answers[NAME]["receipt"].split(".")

    done = verify(tmp_path, f"{head}.{payload[:-4]}AAAA.{signature}", answered)

    assert done.exit_code == 1
    assert done.output.startswith("signature  does NOT hold")


@pytest.mark.parametrize("place", [0, 41, 79])
def test_the_first_token_of_another_answer_is_named(
    answered: Answers, model: ServedModel, place: int
) -> None:
    receipt = receipt_of(answered, NAME)
    token_ids = list(receipt.choices[0].token_ids)
    token_ids[place] = (token_ids[place] + 7) % 40_000
    forged = with_choice(receipt, token_ids=tuple(token_ids))

    found = recomputed(forged, answered.requests[NAME], model)

    assert len(found.differences) == 1
    assert f"at token {place}: the receipt has {token_ids[place]} " in found.differences[0]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        pytest.param({"text_sha256": "0" * 64}, "make another text", id="text"),
        pytest.param({"finish_reason": "stop"}, "for another reason", id="finish reason"),
        pytest.param({"stop_reason": "end"}, "for another reason", id="stop reason"),
    ],
)
def test_an_end_or_a_text_that_the_tokens_do_not_make_is_named(
    answered: Answers, model: ServedModel, changes: dict[str, Any], problem: str
) -> None:
    forged = with_choice(receipt_of(answered, NAME), **changes)

    assert problem in recomputed(forged, answered.requests[NAME], model).problem


def test_an_answer_that_was_cut_off_is_named(answered: Answers, model: ServedModel) -> None:
    receipt = receipt_of(answered, NAME)
    forged = with_choice(receipt, token_ids=receipt.choices[0].token_ids[:-1])

    assert "ends early" in recomputed(forged, answered.requests[NAME], model).problem


def test_a_seed_or_a_parameter_that_was_not_asked_for_is_named(
    answered: Answers, model: ServedModel
) -> None:
    receipt, body = receipt_of(answered, NAME), answered.requests[NAME]
    colder = structs.replace(receipt.sampling, temperature=0.0)

    assert "seed" in Recomputation(structs.replace(receipt, seed="1"), body, model).problem()
    changed = structs.replace(receipt, sampling=colder)
    assert "parameters" in Recomputation(changed, body, model).problem()


def test_a_receipt_of_another_model_is_named_before_anything_is_computed(
    answered: Answers, model: ServedModel
) -> None:
    receipt, body = receipt_of(answered, NAME), answered.requests[NAME]
    other = structs.replace(model_of(receipt), fingerprint="c0ffee")
    execution = structs.replace(receipt.executions[0], provenance=other)
    foreign = structs.replace(receipt, executions=(execution,))

    problem = Recomputation(foreign, body, model).problem()

    assert problem == f"the answer is of the model c0ffee, and this one is {model.fingerprint}"


@pytest.mark.parametrize("kind", ["q8_0", "q4_1", "another checkpoint"])
def test_answers_of_other_weights_are_found_out_although_they_are_signed(
    answered: Answers, model: ServedModel, smollm2: Path, tmp_path: Path, kind: str
) -> None:
    is_packed = kind != "another checkpoint"
    directory = smollm2 if is_packed else fine_tuned(smollm2, tmp_path)
    format_ = kind if is_packed else "auto"
    requests = {NAME: REQUESTS[NAME]}
    others = asyncio.run(
        answers_of(directory, answered.signing_key, requests, weight_format=format_)
    )
    claim = claiming(receipt_of(others, NAME), model)
    signed = ReceiptKeys.of(answered.signing_key).sign(claim)

    found = recomputed(verified(signed, answered.keys), others.requests[NAME], model)

    assert len(found.differences) == 1
    assert "differs at token" in found.differences[0]


def test_with_other_numerics_a_difference_is_evidence_and_no_proof(
    answered: Answers, model: ServedModel
) -> None:
    receipt = receipt_of(answered, NAME)
    execution = structs.replace(receipt.executions[0], numerics="cuda sm90 native bfloat16 triton")
    token_ids = list(receipt.choices[0].token_ids)
    token_ids[5] = token_ids[6]
    foreign = with_choice(
        structs.replace(receipt, executions=(execution,)), token_ids=tuple(token_ids)
    )

    found = recomputed(foreign, answered.requests[NAME], model)

    assert found.standard == "margins"
    assert "cuda sm90" in found.why_not_exact
    assert found.num_tokens == 80
    assert 1 <= len(found.differences) < 40


def test_margins_of_tokens_that_differ_are_summed_up(answered: Answers, model: ServedModel) -> None:
    receipt, body = receipt_of(answered, NAME), answered.requests[NAME]
    execution = structs.replace(receipt.executions[0], numerics="cuda sm90 native bfloat16 triton")
    token_ids = list(receipt.choices[0].token_ids)
    token_ids[79] = (token_ids[79] + 7) % 40_000
    foreign = structs.replace(receipt, executions=(execution,))
    forged = with_choice(foreign, token_ids=tuple(token_ids))

    same, other = (recomputed(one, body, model) for one in (foreign, forged))

    assert (same.differences, same.evidence) == ([], ())
    (difference,) = other.differences
    margin = difference.rpartition("by a margin of ")[2]
    assert 0 < float(margin) <= 1
    assert other.evidence == [
        f"margins of the tokens that differ: median {margin}, maximum {margin}"
    ]


async def test_answers_that_were_computed_once_are_those_of_the_model(
    model: ServedModel, smollm2: Path, signing_key: Path
) -> None:
    body = body_of({"prompt": "The sea", "max_tokens": 8, "temperature": 0})
    exact = {"x-warren-cache": "exact"}
    async with deployment(smollm2, signing_key) as gateway:
        answers = [await asked(gateway, "/v1/completions", body, **exact) for _ in range(2)]
        keys = await keys_of(gateway)

    receipts = [verified(answer["receipt"], keys) for answer in answers]

    assert receipts[0].id != receipts[1].id
    assert receipts[0].seed == receipts[1].seed
    for receipt in receipts:
        found = Recomputation(receipt, body, model)
        assert found.problem() == ""
        assert (await found.compare()).differences == []


async def test_a_fork_is_verified_from_its_first_own_token(
    model: ServedModel, smollm2: Path, signing_key: Path
) -> None:
    kept = body_of({"prompt": "The sea", "max_tokens": 12, "seed": 3, "detach": True})
    changed = body_of({"prompt": "The sea", "max_tokens": 16, "seed": 4, "temperature": 0.7})
    async with deployment(smollm2, signing_key) as gateway:
        first = await asked(gateway, "/v1/completions", kept)
        fork = await asked(gateway, f"/v1/streams/{first['id']}/fork?at=9", changed)
        receipt = verified(fork["receipt"], await keys_of(gateway))

    found = Recomputation(receipt, changed, model)

    assert found.problem() == ""
    result = await found.compare()
    assert (result.num_tokens, result.differences, result.problem) == (7, [], "")


@pytest.mark.parametrize("temperature", [0, 0.8])
async def test_answers_of_an_engine_behind_the_queue_are_judged_by_evidence(
    answered: Answers,
    model: ServedModel,
    smollm2: Path,
    signing_key: Path,
    temperature: float,
) -> None:
    script = receipt_of(answered, "stop string").choices[0].token_ids
    body = body_of({"prompt": "1, 2, 3, 4,", "max_tokens": len(script), "temperature": temperature})
    with engine_server("vllm", Tokenizer.load(smollm2)) as engine:
        engine.script = script
        options = {"engine": "vllm", "engine_url": engine.url, "max_seq_len": engine.max_seq_len}
        async with deployment(smollm2, signing_key, **options) as gateway:
            answer = await asked(gateway, "/v1/completions", body)
            receipt = verified(answer["receipt"], await keys_of(gateway))

    found = Recomputation(receipt, body, model)

    assert found.problem() == ""
    result = await found.compare()
    assert result.num_tokens == len(script)
    assert (result.differences, result.problem) == ([], "")
    assert "vllm" in result.why_not_exact
    assert result.standard == ("likelihood" if temperature else "margins")
    if temperature:  # the script has the most likely tokens
        assert "ranks of the tokens: median 1, maximum 1" in result.evidence
        assert "tokens that this model cannot draw: 0" in result.evidence


async def test_an_engine_with_another_tokenizer_has_another_model(
    answered: Answers, model: ServedModel
) -> None:
    receipt, body = receipt_of(answered, NAME), answered.requests[NAME]
    other = structs.replace(model_of(receipt), tokenizer="c0ffee", fingerprint="of the engine")
    execution = structs.replace(receipt.executions[0], numerics="vllm 1 c0ffee", provenance=other)
    foreign = structs.replace(receipt, executions=(execution,))

    problem = Recomputation(foreign, body, model).problem()

    assert "tokenizer c0ffee" in problem


def test_a_command_says_what_evidence_is_worth(
    answered: Answers, tmp_path: Path, smollm2: Path
) -> None:
    receipt = receipt_of(answered, NAME)
    execution = structs.replace(receipt.executions[0], numerics="vllm 1 c0ffee")
    signed = ReceiptKeys.of(answered.signing_key).sign(
        structs.replace(receipt, executions=(execution,))
    )
    request = tmp_path / "request.json"
    request.write_bytes(answered.requests[NAME])
    options = ("--request", str(request), "--model", str(smollm2))

    done = verify(tmp_path, signed, answered, *options)

    assert done.exit_code == 0, done.output
    assert "without its random numbers" in done.output
    assert "log probabilities of the tokens: median -" in done.output
    assert "This is evidence and no proof: the numerics are vllm 1 c0ffee" in done.output


def test_verifying_takes_a_fraction_of_the_time_of_generating(
    answered: Answers, model: ServedModel
) -> None:
    """CPU time of this process, whose threads compute both."""
    receipt = receipt_of(answered, NAME)
    began = time.process_time()
    recomputed(receipt, answered.requests[NAME], model)
    verifying_s = time.process_time() - began

    assert verifying_s < 0.3 * answered.seconds[NAME]


def model_of(receipt: Receipt) -> Provenance:
    provenance = receipt.executions[0].provenance
    assert provenance is not None
    return provenance


def claiming(receipt: Receipt, model: ServedModel) -> Receipt:
    """A receipt that claims to be of another model than it is."""
    provenance = structs.replace(
        model_of(receipt), fingerprint=model.fingerprint, weight_format="auto"
    )
    claimed = structs.replace(receipt.executions[0], provenance=provenance, numerics=model.numerics)
    return structs.replace(receipt, executions=(claimed,))


def fine_tuned(model: Path, place: Path) -> Path:
    """The model with a tensor of its weights changed by a hundredth."""
    directory = place / "model"
    directory.mkdir()
    for file in model.iterdir():
        if file.suffix != ".safetensors":
            (directory / file.name).symlink_to(file)
            continue
        tensors: dict[str, torch.Tensor] = load_file(file)
        name = next(name for name in tensors if "layers.12.mlp.down_proj" in name)
        tensors[name] = tensors[name] * 1.01
        save_file(tensors, directory / file.name, {"format": "pt"})
    return directory
