"""Parses the JSON body of a request into a struct, and rejects parameters by name that are invalid,
or that are unsupported parameters of OpenAI or vLLM.

Each unsupported parameter is listed with its neutral values; null, {} and [] are removed first.
Parameters that do not change answers (``store``, ``metadata``, ``service_tier``, ...) and unknown
parameters are not listed, and therefore ignored.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import islice
from typing import Any, ClassVar, TypeVar

import msgspec
from msgspec import Struct, inspect

from shared.errors import InvalidRequest
from shared.messages import MAX_TEXT_CHARS

MAX_DEPTH = 64
_MISSING = re.compile(r"Object missing required field `(\w+)`")
_FLOAT_FOR_INT = re.compile(r"Expected `(?:.* )?int\b.*`, got `float` - at `\$(.*)`")
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]", re.ASCII)
_MAX_FLOATS = 16
"""Places at which integral floats are accepted. All items of a list count as a single place."""
_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F]\w\w)|.)",
    re.DOTALL,
)
"""An escape in JSON; the group is half of a surrogate pair without its other half."""
_WITH_PARTS = frozenset(
    {"messages", "reasoning", "response_format", "stream_options", "text", "tools"}
)
"""Errors name the invalid part of these parameters: `messages[0].role`, but `stop` for
`stop[3]`."""

_T = TypeVar("_T")
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    # OpenAI
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": (),
    "modalities": (["text"],),
    "prediction": (),
    "suffix": ("",),
    "web_search_options": (),
    # vLLM
    "cache_salt": (),
    "chat_template": (),
    "detokenize": (True,),
    "documents": (),
    "guided_whitespace_pattern": (),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": (),
    "media_io_kwargs": (),
    "mm_processor_kwargs": (),
    "priority": (0,),
    "prompt_embeds": (),
    "repetition_detection": (),
    "return_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "structural_tag": (),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "vllm_xargs": (),
    # llama.cpp
    "cache_prompt": (True,),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "grammar": ("",),
    "json_schema": (),
    "mirostat": (0,),
    "n_keep": (0,),
    "n_predict": (-1,),
    "n_probs": (0,),
    "post_sampling_probs": (False,),
    "samplers": (),
    "typical_p": (1,),
    "xtc_probability": (0,),
}
CHAT_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    **NEUTRAL,
    "add_special_tokens": (False,),
    "best_of": (1,),
    "echo": (False,),
    "prompt": (),
}
COMPLETION_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    **NEUTRAL,
    "add_generation_prompt": (True,),
    "chat_template_kwargs": (),
    "continue_final_message": (False,),
    "messages": (),
    "parallel_tool_calls": (True, False),
    "tool_choice": ("none", "auto"),
    "tools": (),
    "top_logprobs": (0,),
    "verbosity": ("medium",),
}
QUICK_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "add_special_tokens": (True,),
    "cache_salt": (),
    "chat_template": (),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "max_tokens_per_doc": (),
    "mm_processor_kwargs": (),
    "normalize": (True,),
    "priority": (0,),
    "rank_fields": (),
    "truncate_prompt_tokens": (),
}
"""The parameters of vLLM's and Cohere's endpoints without generation."""
_MAX_IGNORED = 16


def read(value: Any, kind: type[_T], path: str = "") -> _T:
    """Convert ``value``, which is at ``path`` in the body. Raises `InvalidRequest`, which names
    the invalid part."""
    complaint = ""
    for _ in range(_MAX_FLOATS):
        try:
            return msgspec.convert(value, kind, str_keys=True)
        except msgspec.ValidationError as error:
            complaint = str(error)
            if not _has_become_integer(value, complaint):
                break
    raise _misfit(with_choices(complaint, kind), path)


def _has_become_integer(value: Any, complaint: str) -> bool:
    """Turn a float that msgspec refuses into the integer that it is, in place: JSON does not
    distinguish 5.0 from 5. Returns whether it is an integer."""
    found = _FLOAT_FOR_INT.fullmatch(complaint)
    if found is None:
        return False
    steps: list[Any] = [name or int(index) for name, index in _STEP.findall(found[1])]
    if not steps or _STEP.sub("", found[1]):  # the key of a dictionary is unknown
        return False
    *before, last = steps
    for step in before:
        value = value[step]
    if not _is_integral(value[last]):
        return False
    places = range(len(value)) if isinstance(value, list) else [last]
    for place in places:
        if _is_integral(value[place]):
            value[place] = int(value[place])
    return True


def _is_integral(value: Any) -> bool:
    return isinstance(value, float) and value.is_integer()


def with_choices(complaint: str, kind: Any) -> str:
    """msgspec's complaint about a value of type ``kind``. If the value is none of several words,
    they are named."""
    reason, at, path = complaint.rpartition(" - at `$")
    if not reason.startswith("Invalid enum value"):
        return complaint
    found = [inspect.type_info(kind)]
    for name in re.findall(r"\.(\w+)|\[", path):
        if name:
            members = (field for one in _options(found) for field in getattr(one, "fields", ()))
            found = [field.type for field in members if field.encode_name == name]
        else:
            lists = (inspect.ListType, inspect.VarTupleType)
            found = [one.item_type for one in _options(found) if isinstance(one, lists)]
    words = [
        str(value)
        for one in _options(found)
        if isinstance(one, inspect.LiteralType)
        for value in one.values
    ]
    return f"{reason}; expected {' or '.join(words)}{at}{path}" if words else complaint


def _options(types: Iterable[inspect.Type]) -> Iterator[inspect.Type]:
    for one in types:
        yield from one.types if isinstance(one, inspect.UnionType) else (one,)


def refused(param: str, reason: str) -> InvalidRequest:
    """An error whose message begins with the name of the parameter."""
    return InvalidRequest(f"{param}: {reason}", param=param)


def check_json(value: Any, param: str, max_depth: int = MAX_DEPTH) -> None:
    """Reject values that are nested too deeply for recursive readers, and integers that do not fit
    into msgpack. Raises `InvalidRequest`."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > max_depth:
            raise refused(param, f"nested deeper than {max_depth} levels.")
        if any(isinstance(one, int) and not -(2**63) <= one < 2**64 for one in level):
            raise refused(param, "an integer is longer than 64 bits.")
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]


def check_length(num_chars: int, param: str) -> None:
    """Reject a text that is too long for a message of the broker, which nothing checks when a
    struct is built. Raises `InvalidRequest`."""
    if num_chars > MAX_TEXT_CHARS:
        raise refused(param, f"longer than {MAX_TEXT_CHARS} characters.")


def _misfit(complaint: str, prefix: str) -> InvalidRequest:
    """Turn msgspec's "Expected `int` - at `$.seed`" into "seed: expected `int`"."""
    reason, _, path = complaint.rpartition(" - at `") if "`$" in complaint else (complaint, "", "")
    path = prefix + path.removeprefix("key` in `").removeprefix("$").removesuffix("`")
    missing = _MISSING.match(reason)
    if missing and not path.startswith(".messages["):
        reason, path = "required, but missing", f"{path}.{missing[1]}"
    path = path.removeprefix(".")
    head = re.split(r"[.\[]", path, maxsplit=1)[0]
    param = path if prefix or missing or head in _WITH_PARTS else head
    return refused(param, f"{reason[0].lower()}{reason[1:]}")


def refuse_unsupported(body: Mapping[str, Any], neutral: Mapping[str, tuple[object, ...]]) -> None:
    """Raise `InvalidRequest` for the first parameter of ``body`` that ``neutral`` lists and whose
    value is not neutral."""
    for name, value in body.items():
        if name in neutral and not any(_is_same(value, other) for other in neutral[name]):
            raise InvalidRequest(
                f"{name} is not supported, except for its neutral value.", param=name
            )


def _is_same(value: object, other: object) -> bool:
    # priority=False is not priority=0, though Python calls them equal.
    return value == other and isinstance(value, bool) == isinstance(other, bool)


class Body(Struct, frozen=True, kw_only=True):
    """The base of all bodies. Unknown parameters are tolerated."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    """Parameters that are not supported, with the neutral values of each."""
    renamed: ClassVar[Mapping[str, str]] = {}
    """Parameters that are refused because they have another name here, and that name."""

    @classmethod
    def check_names(cls, body: Mapping[str, Any]) -> None:
        """Raise `InvalidRequest` for a parameter that is not supported."""
        refuse_unsupported(body, cls.neutral)


_Body = TypeVar("_Body", bound=Body)


def parse(kind: type[_Body], body: bytes) -> _Body:
    """Parse a JSON body. Raises `InvalidRequest`, also for unsupported parameters, and
    `ModelNotFound`."""
    return parse_with_ignored(kind, body)[0]


def parse_with_ignored(kind: type[_Body], body: bytes) -> tuple[_Body, tuple[str, ...]]:
    """The same as `parse`, with the names of the first parameters that are ignored because they are
    unknown."""
    try:
        said = msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"The body is not valid JSON: {json_fault(body, error)}") from None
    if not isinstance(said, dict):
        raise InvalidRequest("body: expected an object")
    required = _required(kind)  # rejected if empty
    said = {name: value for name, value in said.items() if name in required or not is_unused(value)}
    request = read(said, kind)
    kind.check_names(said)
    known = _known(kind)
    unknown = (name for name in said if name not in known)
    return request, tuple(islice(unknown, _MAX_IGNORED))


def json_fault(text: bytes, error: Exception) -> str:
    """Why ``text`` is not valid JSON; msgspec reports ``error``. A text that was cut within an
    emoji is named as such, because msgspec may take the end of the string for missing."""
    reason = str(error)
    if "truncated" not in reason and "surrogate" not in reason:
        return reason
    half = next((escape for escape in _ESCAPE.finditer(text) if escape[1]), None)
    if half is None:
        return reason
    return (
        f"\\{half[1].decode()} at byte {half.start()} is half of a surrogate pair, as in a text "
        "that was cut within an emoji."
    )


def is_unused(value: Any) -> bool:
    """Whether a client library sent this value for a parameter that its user left out."""
    return value is None or value == {} or value == []


@cache
def _known(kind: type[Body]) -> frozenset[str]:
    names = {field.encode_name for field in msgspec.structs.fields(kind)}
    return frozenset(names | kind.neutral.keys())


@cache
def _required(kind: type[Body]) -> frozenset[str]:
    return frozenset(field.name for field in msgspec.structs.fields(kind) if field.required)
