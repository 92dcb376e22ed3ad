"""Compiled constraints: what they allow, and what they may cost the worker."""

import asyncio
import json
import re
import resource
from copy import copy
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken
from tokenizers.models import WordLevel

from gateway.api.render.choice_reader import ChoiceReader, merged
from gateway.text.pieces import CallArguments, CallStart
from shared.errors import InvalidRequest
from shared.messages import Constraint
from tests.support.gateway.rendering import context_of
from tests.support.gateway.tool_calls import FORMS, TIME, WEATHER, use_of
from tests.support.text.tokenizers import byte_level_tokenizer, save_tokenizer
from worker.decode import constraints
from worker.decode.constraints import Constraints, Grammar, token_mask
from worker.text import Tokenizer

_MAX_CPU_S = 20.0
"""A trial ends itself after a second of CPU time."""
_MIN_ROUNDS = 10
"""Rounds of an event loop that is free beside a trial. A loop that is held up comes round once."""
BOMBS = [
    Constraint(kind="json_schema", source=json.dumps({"type": "integer", "multipleOf": 999_983})),
    Constraint(kind="regex", source=r"[\p{L}--\p{Lu}]*" * 2000),
    Constraint(
        kind="lark",
        source="\n".join(
            ["start: r0", *(f'r{k}: r{k + 1} | "a"' for k in range(3000)), 'r3000: "a"']
        ),
    ),
]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    config = {"eos_token": "</s>"}
    return Tokenizer.load(save_tokenizer(byte_level_tokenizer(), tmp_path, tokenizer_config=config))


def walk(grammar: Grammar, tokenizer: Tokenizer, text: str) -> bool:
    """Whether ``text`` may be drawn token by token."""
    matcher = grammar.matcher((), None)
    for token_id in tokenizer.encode_text(text):
        if not matcher.mask()[token_id // 8] >> token_id % 8 & 1:
            return False
        matcher.advance(token_id)
    return True


async def test_masks_hold_what_the_constraint_allows(tokenizer: Tokenizer) -> None:
    grammar = await Constraints(tokenizer).compile(Constraint(kind="regex", source="a(b|c)d"))

    assert walk(grammar, tokenizer, "acd")
    assert not walk(grammar, tokenizer, "add")


async def test_a_compiled_constraint_is_kept_for_its_tenant_only(tokenizer: Tokenizer) -> None:
    constraints, constraint = Constraints(tokenizer), Constraint(kind="regex", source="a(b|c)d")
    grammar = await constraints.compile(constraint, "alice")

    again = await constraints.compile(constraint, "alice")
    of_another = await constraints.compile(constraint, "bob")

    assert again is grammar
    assert of_another is not grammar


async def test_text_without_a_choice_is_forced(tokenizer: Tokenizer) -> None:
    schema = {"type": "object", "properties": {"name": {"type": "boolean"}}, "required": ["name"]}
    constraint = Constraint(kind="json_schema", source=json.dumps(schema))
    matcher = (await Constraints(tokenizer).compile(constraint)).matcher((), None)

    forced = matcher.forced_tokens()

    assert tokenizer.decode(forced).startswith('{"name"')


async def test_masks_are_known_in_advance_as_far_as_tokens_are_allowed(
    tokenizer: Tokenizer,
) -> None:
    grammar = await Constraints(tokenizer).compile(Constraint(kind="regex", source="ab(c|d)ef"))
    token_ids = tokenizer.encode_text("abdex")
    matcher, ahead = grammar.matcher((), None), grammar.matcher((), None)
    expected = []
    for token_id in token_ids[:-1]:
        matcher.advance(token_id)
        expected.append(matcher.mask())

    masks = ahead.masks_after(token_ids)

    assert masks == expected
    assert ahead.mask() == grammar.matcher((), None).mask()


def cpu_s_of_children() -> float:
    """The CPU time of processes that this process has started, and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize("bomb", BOMBS)
async def test_a_bomb_is_refused_beside_the_event_loop(
    bomb: Constraint, tokenizer: Tokenizer
) -> None:
    constraints = Constraints(tokenizer)
    num_rounds, before_s = 0, cpu_s_of_children()
    compiling = asyncio.create_task(constraints.compile(bomb))

    while not compiling.done():
        await asyncio.sleep(0.001)
        num_rounds += 1

    with pytest.raises(InvalidRequest, match="cannot be used"):
        await compiling
    assert num_rounds >= _MIN_ROUNDS
    assert cpu_s_of_children() - before_s < _MAX_CPU_S


async def test_a_tenants_bombs_do_not_hold_up_the_jobs_of_another(tokenizer: Tokenizer) -> None:
    constraints = Constraints(tokenizer)
    sources = [json.dumps({"type": "integer", "multipleOf": n}) for n in (999_961, 999_959)]
    bombs = [
        asyncio.create_task(constraints.compile(Constraint(kind="json_schema", source=one), "a"))
        for one in sources
    ]
    await asyncio.sleep(0)  # the first has its turn

    await constraints.compile(Constraint(kind="regex", source="[ab]+"), "b")

    assert not bombs[1].done()
    bombs[1].cancel()
    with pytest.raises(InvalidRequest):
        await bombs[0]


async def test_a_model_whose_tokenizer_llguidance_cannot_read_has_no_constraints(
    tmp_path: Path,
) -> None:
    words = tokenizers.Tokenizer(WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    constraints = Constraints(Tokenizer.load(save_tokenizer(words, tmp_path)))

    with pytest.raises(InvalidRequest, match="tokenizer of the model does not support"):
        await constraints.compile(Constraint(kind="regex", source="a+"))


async def test_a_constraint_that_names_unknown_tokens_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="unknown special token"):
        await Constraints(tokenizer).compile(Constraint(kind="lark", source="start: <|nobody|>"))


TAGGED = Constraint(
    kind="lark",
    source='start: text entry_tag "x"\ntext: /(?s:.*)/\nentry_tag: "<tag>"',
)


@pytest.mark.parametrize("is_special", [False, True])
async def test_a_tag_is_a_token_if_the_vocabulary_has_it(is_special: bool, tmp_path: Path) -> None:
    encoder = byte_level_tokenizer()
    encoder.add_tokens([AddedToken("<tag>", special=is_special)])
    tokenizer = Tokenizer.load(save_tokenizer(encoder, tmp_path, tokenizer_config={}))

    grammar = await Constraints(tokenizer).compile(TAGGED)

    assert walk(grammar, tokenizer, "Look: <tag>x")
    assert not walk(grammar, tokenizer, "Look: <tag>y")


@pytest.mark.parametrize("parser", FORMS)
@pytest.mark.parametrize("is_special", [False, True])
async def test_each_family_calls_with_its_own_tokens(
    parser: str, is_special: bool, tmp_path: Path
) -> None:
    weather, now, between, (opening, closing) = FORMS[parser]
    calls = f"{opening}{weather}{between}{now}{closing}"
    encoder = byte_level_tokenizer()
    tags = sorted(set(re.findall(r"<[^<>=]+>", calls)))
    encoder.add_tokens([AddedToken(tag, special=is_special) for tag in tags])
    config = {"eos_token": "</s>"}
    tokenizer = Tokenizer.load(save_tokenizer(encoder, tmp_path, tokenizer_config=config))
    use = use_of([WEATHER, TIME], "required", parser=parser)
    free = use_of([WEATHER, TIME], "auto", parser=parser)
    assert use is not None
    assert free is not None
    required, bound = use.constraint(None), free.constraint_after_tag(None)

    assert walk(await Constraints(tokenizer).compile(required), tokenizer, calls)
    if bound is not None:
        grammar = await Constraints(tokenizer).compile(bound)
        assert walk(grammar, tokenizer, f"Look: {calls}\nDone.")
        assert not walk(grammar, tokenizer, calls.replace("weather", "whether"))


@pytest.mark.parametrize("text", ["</s>", "<|im_end|>", "<tag>", "a <tag>b", "<unk>"])
@pytest.mark.parametrize("is_special", [False, True])
async def test_text_of_a_special_token_is_written_with_other_tokens(
    is_special: bool, text: str, tmp_path: Path
) -> None:
    encoder = byte_level_tokenizer()
    encoder.add_tokens(
        [AddedToken(one, special=is_special) for one in ("<tag>", "<|im_end|>", "</s>")]
    )
    config = {"eos_token": "</s>"}
    tokenizer = Tokenizer.load(save_tokenizer(encoder, tmp_path, tokenizer_config=config))
    schema = {
        "type": "object",
        "properties": {text: {"const": text}},
        "required": [text],
        "additionalProperties": False,
    }
    sources = {
        "json_schema": json.dumps(schema),
        "regex": re.escape(text),
        "lark": f"start: {json.dumps(text)} // <tag>",
    }

    for kind, source in sources.items():
        constraint = Constraint(kind=kind, source=source)  # type: ignore[arg-type]
        written = forced(await Constraints(tokenizer).compile(constraint), tokenizer)
        expected = f'{{"{text}": "{text}"}}' if kind == "json_schema" else text
        assert written.replace(':"', ': "') == expected


def forced(grammar: Grammar, tokenizer: Tokenizer) -> str:
    """The text that is written if the first allowed token is taken each time."""
    matcher = grammar.matcher((), None)
    token_ids: list[int] = []
    while not matcher.is_complete:
        mask = int.from_bytes(matcher.mask(), "little")
        token_ids.append((mask & -mask).bit_length() - 1)
        assert token_ids[-1] not in tokenizer.eos_ids
        matcher.advance(token_ids[-1])
    return tokenizer.decode(token_ids)


MAP = {
    "type": "object",
    "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 9},
    "minProperties": 2,
    "maxProperties": 2,
}


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint(kind="json_schema", source=json.dumps(MAP)),
        Constraint(kind="lark", source=f'start: "Map: " %json {json.dumps(MAP)}'),
    ],
)
async def test_no_property_is_written_twice(constraint: Constraint, tokenizer: Tokenizer) -> None:
    grammar = await Constraints(tokenizer).compile(constraint)
    before = "Map: " if constraint.kind == "lark" else ""

    assert walk(grammar, tokenizer, before + '{"x":1,"y":1}')
    assert walk(grammar, tokenizer, before + '{"x":1,"xx":1}')
    assert not walk(grammar, tokenizer, before + '{"x":1,"x":1}')


ONLY_K = {
    "type": "object",
    "patternProperties": {"^k$": {"const": 1}},
    "additionalProperties": False,
    "minProperties": 2,
}


async def test_an_object_whose_properties_are_all_written_cannot_continue(
    tokenizer: Tokenizer,
) -> None:
    constraint = Constraint(kind="json_schema", source=json.dumps(ONLY_K))
    matcher = (await Constraints(tokenizer).compile(constraint)).matcher((), None)
    for token_id in tokenizer.encode_text('{"k":1,"k'):
        matcher.advance(token_id)

    assert not matcher.forced_tokens()
    with pytest.raises(InvalidRequest, match="each property that may follow has been written"):
        matcher.mask()


async def test_a_grammar_may_name_a_special_token_beside_its_text(tmp_path: Path) -> None:
    encoder = byte_level_tokenizer()
    encoder.add_tokens([AddedToken("<tag>", special=True)])
    tokenizer = Tokenizer.load(save_tokenizer(encoder, tmp_path, tokenizer_config={}))
    constraint = Constraint(kind="lark", source='start: <tag> /<tag>/ "<tag>" // <tag>')
    matcher = (await Constraints(tokenizer).compile(constraint)).matcher((), None)
    tag = tokenizer.token_id("<tag>")
    assert tag is not None

    for token_id in [tag, *(tokenizer.encode_text(char)[0] for char in "<tag><tag>")]:
        assert not matcher.is_complete
        matcher.advance(token_id)

    assert matcher.is_complete


ROME, OSLO = '<c>{"city": "Rome"}</c>', '<c>{"city": "Oslo"}</c>'
CALLS = Constraint(
    kind="lark",
    source='start: call (/ ?/ call)*\ncall: "<c>" object "</c>"\n'
    'object[capture="tool_call"]: %json {"type": "object"}',
)


@pytest.mark.parametrize(
    ("text", "is_complete"),
    [
        (ROME * 2, False),
        (ROME * 3, True),
        (f"{OSLO}{ROME} {ROME} {ROME}", True),
        (f"{ROME} {ROME}{ROME}", True),
        (f"{ROME}{ROME}{OSLO}{ROME}", False),
        (f"{ROME}{OSLO}" * 4, False),
        (f"{ROME}{ROME}{ROME[:-6]}", False),
    ],
)
async def test_equal_calls_are_soon_enough(
    text: str, is_complete: bool, tokenizer: Tokenizer
) -> None:
    grammar = await Constraints(tokenizer).compile(CALLS)
    # A call is whole before its closing tag.
    token_ids = tokenizer.encode_text(text.removesuffix("</c>"))
    matcher = grammar.matcher((), None)

    for token_id in token_ids:
        assert not matcher.is_complete
        matcher.advance(token_id)

    continued = grammar.matcher(token_ids, None)
    assert matcher.is_complete is continued.is_complete is is_complete
    if is_complete:
        assert continued.mask() == token_mask(tokenizer.eos_ids, tokenizer.num_mask_bytes)


async def test_other_threads_run_while_a_long_output_is_replayed(tokenizer: Tokenizer) -> None:
    taken: list[int] = []

    class Recorder:
        def deep_copy(self) -> "Recorder":
            return self

        def consume_tokens(self, token_ids: list[int]) -> bool:
            taken.append(len(token_ids))
            return True

        def get_capture(self, name: str) -> None:
            """A grammar without captures."""

    Grammar(Recorder(), tokenizer).matcher(range(100), None)  # type: ignore[arg-type]

    assert sum(taken) == 100
    assert max(taken) <= 16


async def test_a_rule_with_an_escape_that_json_lacks_is_compiled(tokenizer: Tokenizer) -> None:
    source = 'start: entry_a\nentry_a: "\\x41"'

    grammar = await Constraints(tokenizer).compile(Constraint(kind="lark", source=source))

    assert walk(grammar, tokenizer, "A")


async def test_a_grammar_whose_forced_tokens_take_long_is_not_asked_for_them_again(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "(the cat sat on the mat ){100}"
    grammar = await Constraints(tokenizer).compile(Constraint(kind="regex", source=source))
    monkeypatch.setattr(constraints, "_MAX_FORCING_S", 0.0)

    num_forced = [len(grammar.matcher((), None).forced_tokens()) for _ in range(2)]

    assert num_forced[0] >= 600
    assert num_forced[1] == 0


async def test_a_grammar_whose_masks_take_long_after_drafts_has_no_more_drafts(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar = await Constraints(tokenizer).compile(Constraint(kind="regex", source="abc(d|e)"))
    forced = grammar.matcher((), None).forced_tokens()
    with monkeypatch.context() as patch:
        patch.setattr(constraints, "_MAX_AHEAD_S", 0.0)
        grammar.matcher((), None).masks_after(forced)

    matcher = grammar.matcher((), None)

    assert forced
    assert not matcher.forced_tokens()
    assert not matcher.masks_after(forced)


async def test_tokens_that_the_model_never_generates_are_not_allowed(tokenizer: Tokenizer) -> None:
    smaller = copy(tokenizer)
    smaller.vocab_size = tokenizer.vocab_size - 1
    anything = Constraint(kind="regex", source="(?s:.*)")

    masks = [
        (await Constraints(one).compile(anything)).matcher((), None).mask()
        for one in (tokenizer, smaller)
    ]

    allowed, fewer = (int.from_bytes(mask, "little") for mask in masks)
    assert fewer == allowed & ((1 << smaller.vocab_size) - 1) != allowed


async def test_a_grammar_of_a_client_may_capture_nothing_as_a_call(tokenizer: Tokenizer) -> None:
    source = 'start: "x" call "y"\ncall[capture="tool_call"]: /z*/'
    grammar = await Constraints(tokenizer).compile(Constraint(kind="lark", source=source))
    matcher = grammar.matcher((), None)

    for token_id in tokenizer.encode_text("x") + tokenizer.encode_text("y"):
        assert not matcher.is_complete
        matcher.advance(token_id)

    assert matcher.is_complete


_NEVER_EQUAL = {"harmony"}
"""A call ends the answer."""


@pytest.mark.parametrize("parser", sorted(FORMS.keys() - _NEVER_EQUAL))
async def test_equal_calls_are_recognized_in_every_form(parser: str, tokenizer: Tokenizer) -> None:
    weather, now, between, (opening, _) = FORMS[parser]
    use = use_of([WEATHER, TIME], "required", parser=parser)
    assert use is not None
    grammar = await Constraints(tokenizer).compile(use.constraint(None))

    def is_complete(*calls: str) -> bool:
        text = opening + between.join(calls)
        return grammar.matcher(tokenizer.encode_text(text), None).is_complete

    assert is_complete(weather, now, now, now)
    assert not is_complete(now, now, weather, now)
    assert not is_complete(weather, now, weather, now, weather)


KIMI = (
    "<|tool_call_begin|>functions.get_time:{}<|tool_call_argument_begin|>{{}}<|tool_call_end|>",
    "<|tool_calls_section_begin|>",
)
MISTRAL = ("[TOOL_CALLS]get_time[CALL_ID]abc{}[ARGS]{{}}", "")
OLDER_MISTRAL = ("[TOOL_CALLS]get_time[ARGS]{{}}", "")


@pytest.mark.parametrize(
    ("parser", "call", "opening"),
    [("kimi_k2", *KIMI), ("mistral", *MISTRAL), ("mistral", *OLDER_MISTRAL)],
)
async def test_calls_that_differ_in_their_ids_are_equal(
    parser: str, call: str, opening: str, tokenizer: Tokenizer
) -> None:
    use = use_of([WEATHER, TIME], "auto", parser=parser)
    assert use is not None
    answer = Constraint(kind="regex", source="No")
    grammar = await Constraints(tokenizer).compile(use.constraint(None, answer))

    def is_complete(num_calls: int) -> bool:
        text = opening + "".join(map(call.format, range(9, 9 + num_calls)))
        return grammar.matcher(tokenizer.encode_text(text), None).is_complete

    assert not is_complete(2)
    assert is_complete(3)


@pytest.mark.parametrize("parser", sorted(FORMS.keys() - _NEVER_EQUAL))
@pytest.mark.parametrize("has_arguments", [True, False])
async def test_the_last_of_equal_calls_is_whole(
    has_arguments: bool, parser: str, tokenizer: Tokenizer
) -> None:
    weather, now, between, (opening, closing) = FORMS[parser]
    call = weather if has_arguments else now
    use = use_of([WEATHER, TIME], "required", parser=parser)
    assert use is not None
    matcher = (await Constraints(tokenizer).compile(use.constraint(None))).matcher((), None)
    drawn = []

    for token_id in tokenizer.encode_text(opening + between.join([call] * 4) + closing):
        drawn.append(token_id)
        matcher.advance(token_id)
        if matcher.is_complete:
            break

    reader = ChoiceReader(context_of(tool_parser=parser, is_forced=True))
    pieces = merged(reader.read(tokenizer.decode(drawn), 1) + reader.end())
    name, arguments = ("get_time", "{}")
    if has_arguments:
        name, arguments = ("get_weather", '{"city": "Rome"}')
    assert pieces == [
        piece for k in range(3) for piece in (CallStart(k, name), CallArguments(k, arguments))
    ]
