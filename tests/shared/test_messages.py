"""The bytes on the wire are a contract: a change here affects every deployed client."""

import pickle
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import messages
from shared.errors import UndecodableMessage
from shared.messages import (
    JSON,
    MSGPACK,
    Accepted,
    AdmissionAnswer,
    Announcement,
    Cancel,
    ChatMessage,
    ChatPrompt,
    Choice,
    Completed,
    Continue,
    Declare,
    DetokenizeJob,
    Drain,
    EmbeddingJob,
    Failed,
    Finished,
    Follow,
    GenerationJob,
    HandedOver,
    LimitedTenants,
    Progress,
    Release,
    Restored,
    SamplingParams,
    Started,
    StopWork,
    TextPrompt,
    TokenDelta,
    TokenizeJob,
    TokenPrompt,
    Withheld,
)

JOB = GenerationJob(
    request_id="chatcmpl-1",
    model="smollm2",
    prompts=(
        ChatPrompt(messages=(ChatMessage(role="user", content="hi"),)),
        TextPrompt(text="a"),
        TokenPrompt(token_ids=(1, 2)),
    ),
    sampling=SamplingParams(max_tokens=3, temperature=0.5, stop=("x",)),
    mode="stream",
    deadline=1.5,
)
GOLDEN_JOB = (
    '{"type":"generation_job","request_id":"chatcmpl-1","model":"smollm2","prompts":['
    '{"type":"chat","messages":[{"role":"user","content":"hi"}]},'
    '{"type":"text","text":"a"},{"type":"tokens","token_ids":[1,2]}],"num_choices":1,'
    '"sampling":{"max_tokens":3,"temperature":0.5,"stop":["x"]},"mode":"stream","deadline":1.5,'
    '"created_at":0.0,"tenant":"","key_id":"","is_detached":false,"each_token":false,"is_counted":false,'
    '"max_total_tokens":null,"given_ids":[],"wants_prompt_text":false,"wants_provenance":false,'
    '"publication":0,"expected_ids":[],"hedge":null,"execution":0,"context":"","trace":{},"version":1}'
)
GOLDEN_EVENTS = [
    (Accepted(body_hash="h"), '{"type":"accepted","body_hash":"h","context":"","execution":0}'),
    (
        Started(worker="worker.1", ticket="t", num_prompt_tokens=(7,)),
        '{"type":"started","worker":"worker.1","ticket":"t","num_prompt_tokens":[7],'
        '"is_waiting":false,"publication":0,"num_returns":0,"hedge":null,"is_alone":false,'
        '"num_moves":0,"execution":0,"numerics":"","context":"","prompt_texts":[],'
        '"provenance":null}',
    ),
    (HandedOver(ticket="t"), '{"type":"handed_over","ticket":"t"}'),
    (
        TokenDelta(choice=0, attempt=1, index=2, prefix_hash=9, token_ids=(5,), text="a"),
        '{"type":"token_delta","choice":0,"attempt":1,"index":2,"prefix_hash":9,"token_ids":[5],'
        '"text":"a"}',
    ),
    (
        Finished(
            choice=0,
            attempt=1,
            index=2,
            prefix_hash=9,
            token_ids=(),
            text="",
            finish_reason="stop",
            stop_reason="x",
        ),
        '{"type":"finished","choice":0,"attempt":1,"index":2,"prefix_hash":9,"token_ids":[],'
        '"text":"","finish_reason":"stop","stop_reason":"x","num_cached_tokens":0,'
        '"num_predicted_tokens":0,"num_chars":[],"logprobs":[],"has_end_token":false}',
    ),
    (
        Failed(code="cancelled", message="m"),
        '{"type":"failed","code":"cancelled","message":"m","param":null,"choice":0,"attempt":0,'
        '"index":0,"prefix_hash":0,"ticket":null,"execution":0}',
    ),
    (
        Restored(events=(HandedOver(ticket="t"),)),
        '{"type":"restored","events":[{"type":"handed_over","ticket":"t"}]}',
    ),
    (
        Completed(
            request_id="r",
            choices=(
                Choice(token_ids=(1,), text="a", finish_reason="length", num_prompt_tokens=2),
            ),
        ),
        '{"type":"completed","request_id":"r","choices":[{"token_ids":[1],"text":"a",'
        '"finish_reason":"length","stop_reason":null,"num_prompt_tokens":2,'
        '"num_cached_tokens":0,"num_predicted_tokens":0,"logprobs":[],"has_end_token":false}],'
        '"prompt_texts":[],"prompt_logprobs":[]}',
    ),
]
GOLDEN_COMMANDS = [
    (
        Cancel(request_id="r"),
        '{"type":"cancel","request_id":"r","ticket":null,"is_replaced":false,"is_outrun":false,'
        '"is_foreign":false}',
    ),
    (
        Continue(request_id="r", ticket="t", attempt=2, choices=(Progress(token_ids=(1,)),)),
        '{"type":"continue","request_id":"r","ticket":"t","attempt":2,"choices":[{"token_ids":[1],'
        '"is_finished":false,"num_cached_tokens":0}],"numerics":"","num_moves":0,"num_crashes":0,"num_crashes_alone":0,'
        '"replaced":null,"is_contested":false}',
    ),
    (
        Release(request_id="r"),
        '{"type":"release","request_id":"r","is_cancelled":false,"reader":"","tenant":null,'
        '"body_hash":"","claimed_at":0.0}',
    ),
    (
        Withheld(request_id="r", reader="g", code="stream_not_found"),
        '{"type":"withheld","request_id":"r","reader":"g","code":"stream_not_found"}',
    ),
    (
        Follow(request_id="r", reply_to="reply.copy-1"),
        '{"type":"follow","request_id":"r","reply_to":"reply.copy-1"}',
    ),
    (Drain(), '{"type":"drain","is_immediate":false}'),
    (StopWork(tenant="alice"), '{"type":"stop_work","tenant":"alice","key_id":""}'),
    (Declare(), '{"type":"declare"}'),
    (
        LimitedTenants(gateway="g", tenants=("alice",), valid_s=15.0),
        '{"type":"limited_tenants","gateway":"g","tenants":["alice"],"valid_s":15.0}',
    ),
    (
        AdmissionAnswer(number=3, is_counted=True),
        '{"type":"admission_answer","number":3,"code":"","message":"","param":null,'
        '"is_counted":true,"max_total_tokens":null}',
    ),
]
GOLDEN_ANNOUNCEMENT = (
    '{"type":"announcement","worker":"worker.1","model":"m","vocab_size":9,"max_seq_len":8,'
    '"fingerprint":"f","numerics":"","is_exact":false,"max_num_seqs":4,"num_running":0,"num_running_batch":0,"batch_reserve":0,'
    '"num_waiting":0,"num_answered":0,'
    '"kv_usage":0.0,"newest_taken":{},"mean_job_tokens":0.0,"mean_job_work_s":0.0,"tool_parser":null,"reasoning_parser":null,"reasoning_switches":[],"template_tells_time":false,"engine":"","is_engine_away":false,"unsupported":[],"engine_constraints":[],"takes_near_jobs":false,"is_leaving":false,"end_notice":"","started_at":0.0,"sent_at":0.0}'
)


OF_QUICK_JOBS = '"tenant":"","key_id":"","deadline":null,"created_at":0.0,"trace":{},"version":1}'
GOLDEN_QUICK_JOBS = [
    (
        TokenizeJob(request_id="r", model="m", prompt=TextPrompt(text="a")),
        '{"type":"tokenize_job","request_id":"r","model":"m","prompt":{"type":"text","text":"a"},'
        + OF_QUICK_JOBS,
    ),
    (
        DetokenizeJob(request_id="r", model="m", token_ids=(1,)),
        '{"type":"detokenize_job","request_id":"r","model":"m","token_ids":[1],' + OF_QUICK_JOBS,
    ),
    (
        EmbeddingJob(request_id="r", model="m", prompts=(TextPrompt(text="a"),)),
        '{"type":"embedding_job","request_id":"r","model":"m","prompts":[{"type":"text",'
        '"text":"a"}],"num_dimensions":null,' + OF_QUICK_JOBS,
    ),
]


def as_json(body: bytes) -> str:
    return msgspec.json.encode(msgspec.msgpack.decode(body)).decode()


def test_a_job_has_these_bytes_and_no_others() -> None:
    assert messages.encode(JOB, JSON).decode() == GOLDEN_JOB
    assert as_json(messages.encode(JOB)) == GOLDEN_JOB
    assert messages.decode_job(GOLDEN_JOB.encode(), JSON) == JOB
    assert messages.decode_job(messages.encode(JOB)) == JOB


@pytest.mark.parametrize(("event", "golden"), GOLDEN_EVENTS, ids=lambda v: type(v).__name__)
def test_reply_events_have_these_bytes(event: messages.ReplyEvent, golden: str) -> None:
    assert messages.encode(event, JSON).decode() == golden
    assert messages.decode_event(golden.encode(), JSON) == event
    assert messages.decode_event(messages.encode(event)) == event


@pytest.mark.parametrize(("command", "golden"), GOLDEN_COMMANDS, ids=lambda v: type(v).__name__)
def test_commands_have_these_bytes(command: messages.Command, golden: str) -> None:
    assert as_json(messages.encode(command)) == golden
    assert messages.decode_command(messages.encode(command)) == command


@pytest.mark.parametrize(("job", "golden"), GOLDEN_QUICK_JOBS, ids=lambda v: type(v).__name__)
def test_quick_jobs_have_these_bytes(job: messages.QuickJob, golden: str) -> None:
    assert as_json(messages.encode(job)) == golden
    assert messages.decode_quick_job(messages.encode(job)) == job


@pytest.mark.parametrize(
    "more", [{}, {"trace": {"traceparent": "t"}, "created_at": 1.5}, {"unheard_of": 1}], ids=str
)
def test_quick_jobs_of_older_and_newer_gateways_are_read(more: dict[str, object]) -> None:
    fields = {"type": "detokenize_job", "request_id": "r", "model": "m", "token_ids": [1]}
    body = msgspec.msgpack.encode({**fields, **more})

    job = messages.decode_quick_job(body)

    assert job.trace == more.get("trace", {})


def test_an_announcement_has_these_bytes() -> None:
    announcement = Announcement(
        worker="worker.1", model="m", vocab_size=9, max_seq_len=8, fingerprint="f", max_num_seqs=4
    )
    assert as_json(messages.encode(announcement)) == GOLDEN_ANNOUNCEMENT
    assert messages.decode_announcement(messages.encode(announcement)) == announcement


def test_the_least_that_another_program_must_say_is_a_job() -> None:
    body = b'{"request_id":"r","model":"m","prompts":[{"type":"text","text":"a"}]}'

    job = messages.decode_job(body, JSON)

    assert (job.mode, job.version) == ("final", messages.WIRE_VERSION)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("request_id", "with space"),
        ("request_id", "newline\n"),
        ("model", "../etc"),
        ("prompts", []),
        ("prompts", [{"type": "tokens", "token_ids": []}]),
        ("prompts", [{"type": "tokens", "token_ids": [-1]}]),
        ("prompts", [{"type": "image", "text": ""}]),
        ("sampling", {"temperature": 2.1}),
        ("sampling", {"temperature": float("nan")}),
        ("sampling", {"top_p": 0.0}),
        ("sampling", {"top_k": -1}),
        ("sampling", {"max_tokens": -1}),
        ("sampling", {"seed": 1 << 63}),
        ("sampling", {"stop": [""]}),
        ("sampling", {"stop": ["x"] * (messages.MAX_STOP_STRINGS + 1)}),
        ("mode", "both"),
        ("deadline", -1.0),
        ("version", messages.WIRE_VERSION + 1),
    ],
)
def test_a_job_beyond_the_limits_is_refused(path: str, value: object) -> None:
    fields = msgspec.json.decode(GOLDEN_JOB)
    body = msgspec.msgpack.encode({**fields, path: value})

    with pytest.raises(UndecodableMessage):
        messages.decode_job(body)


def test_a_newer_version_is_refused_before_the_rest_is_read() -> None:
    body = msgspec.msgpack.encode({"version": messages.WIRE_VERSION + 1, "prompts": "unreadable"})

    with pytest.raises(UndecodableMessage, match="wire version"):
        messages.decode_job(body)


@pytest.mark.parametrize(
    ("golden", "secret"),
    [
        ('"text":"a"', '"text":["secret"]'),
        ('"type":"text"', '"type":"secret"'),
        ('"role":"user"', '"role":"a secret, \'quoted\' - at `$`\\n"'),
        ('"mode":"stream"', '"mode":"secret"'),
        ('"model":"smollm2"', '"model":"sec ret"'),
    ],
)
def test_the_error_names_the_field_and_not_the_content(golden: str, secret: str) -> None:
    body = GOLDEN_JOB.replace(golden, secret)

    with pytest.raises(UndecodableMessage) as caught:
        messages.decode_job(body.encode(), JSON)

    assert "$." in caught.value.message
    assert "sec" not in caught.value.message


def test_the_error_says_how_a_body_without_its_content_type_was_read() -> None:
    with pytest.raises(UndecodableMessage, match="it was read as MessagePack, because its content"):
        messages.decode_job(b"{}", "text/plain")
    with pytest.raises(UndecodableMessage) as caught:
        messages.decode_job(b"{", JSON)
    assert "MessagePack" not in caught.value.message


@given(st.binary(max_size=200), st.sampled_from([JSON, MSGPACK, "text/plain", ""]))
def test_any_bytes_decode_or_raise_one_error(body: bytes, content_type: str) -> None:
    for decode in (messages.decode_job, messages.decode_event):
        try:
            decode(body, content_type)
        except UndecodableMessage:
            continue


@given(st.data())
def test_a_damaged_job_decodes_or_raises_one_error(data: st.DataObject) -> None:
    body = bytearray(messages.encode(JOB))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))

    try:
        messages.decode_job(bytes(body))
    except UndecodableMessage:
        return


def test_deep_nesting_is_an_error_and_not_a_crash() -> None:
    with pytest.raises(UndecodableMessage):
        messages.decode_job(b'{"prompts":' + b"[" * 100_000, JSON)


def test_a_job_without_a_seed_draws_one_from_its_id() -> None:
    first, again, other = (
        GenerationJob(request_id=request_id, model="m", prompts=(TextPrompt(text="a"),))
        for request_id in ("one", "one", "two")
    )

    assert first.seed == again.seed != other.seed
    assert 0 <= first.seed < 1 << 64


def test_a_negative_seed_is_the_unsigned_number_of_the_same_bits() -> None:
    job = GenerationJob(
        request_id="r",
        model="m",
        prompts=(TextPrompt(text="a"),),
        sampling=SamplingParams(seed=-1),
    )

    assert job.seed == (1 << 64) - 1


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self._path,)


def test_pickled_messages_are_not_opened(tmp_path: Path) -> None:
    path = tmp_path / "exploded"
    body = pickle.dumps(Bomb(path))

    for decode in (
        messages.decode_job,
        messages.decode_quick_job,
        messages.decode_event,
        messages.decode_command,
        messages.decode_announcement,
        messages.decode_usage,
        messages.decode_record,
    ):
        with pytest.raises(UndecodableMessage):
            decode(body)

    assert not path.exists()
