"""Plans the choices of a job and decodes them: tokenizes and validates its prompts, and converts
the tokens of its answers into text and events."""

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from msgspec import structs

from shared.errors import ContextLengthExceeded, InvalidRequest
from shared.log import LogWriter, TokenChain
from shared.messages import (
    ChatPrompt,
    Finished,
    FinishReason,
    GenerationJob,
    JobClass,
    Prompt,
    Provenance,
    SamplingParams,
    TextPrompt,
    TokenDelta,
    TokenLogprobs,
    TokenPrompt,
    encode,
    prompt_facts,
)
from shared.version import VERSION
from worker.decode.constraints import Grammar, GrammarMatcher, token_mask
from worker.decode.scores import PromptScorer, token_logprobs
from worker.decode.served_model import ServedModel
from worker.decode.whole_answer import ChoiceEvent
from worker.engine.interface import Output, PromptScored, SequenceId, StepOutput, Submit
from worker.text import Tokenizer
from worker.text.stream import TextStream

_MESSAGE_SIZE = 300
"""An upper estimate of what a chat template and a name add to a message, in characters."""
_INLINE_SIZE = 2000
"""Tokenizing this much takes less than the 0.5 ms of a round trip to another thread; the text of as
many tokens takes little more."""
_MAX_EVENT_TOKENS = 1024
"""Tokens gather while the broker is away. With 20 logprobs each, so many take half a megabyte."""
_RUNS = itertools.count()
_LONG_REPLAY = 500
"""Tokens. Replaying this many takes 3 ms; switching to another thread would delay the event loop by
5 ms."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens that a job's choices may draw."""

    bad_words: list[list[int]]
    allowed: bytes | None
    """A bit mask, as `TokenConstraint.mask`; None: all tokens."""
    grammar: Grammar | None


@dataclass(frozen=True, slots=True)
class ChoicePlan:
    """The choices of a prompt: its token ids, the maximum length and the constraint."""

    prompt_ids: list[int]
    max_tokens: int
    vocabulary: Vocabulary


async def plan(job: GenerationJob, model: ServedModel) -> list[ChoicePlan]:
    """Tokenize the job's prompts and compile its constraint.

    Raises `InvalidRequest` and `ContextLengthExceeded`.
    """
    _check(job.sampling, model)
    constraint, grammar = job.sampling.constraint, None
    if constraint is not None:
        grammar = await model.constraints.compile(constraint, job.tenant)
    vocabulary = _vocabulary(job.sampling, model.tokenizer, grammar)
    if sum(_size(prompt) for prompt in job.prompts) <= _INLINE_SIZE:
        # A template can render megabytes from a few characters. Such a text is left to the thread.
        with suppress(ContextLengthExceeded):
            return _plan(job, model, vocabulary, _INLINE_SIZE)
    return await model.texts.run(job.tenant, partial(_plan_long, job, model, vocabulary))


def plan_now(job: GenerationJob, model: ServedModel) -> list[ChoicePlan]:
    """`plan` in the calling thread, for the jobs of the program itself. Raises the same errors."""
    _check(job.sampling, model)
    constraint, grammar = job.sampling.constraint, None
    if constraint is not None:
        grammar = model.constraints.compile_now(constraint)
    return _plan_long(job, model, _vocabulary(job.sampling, model.tokenizer, grammar))


def _check_supported(sampling: SamplingParams, model: ServedModel) -> None:
    """Raise `InvalidRequest` for a parameter that the engine of this worker lacks. Gateways refuse
    it before, unless workers of the same model have different engines."""
    for name in sampling.used(model.unsupported):
        raise InvalidRequest(
            f"The engine of this model ({model.engine_version}) does not support {name}.",
            param=name,
        )


async def prompt_texts(
    job: GenerationJob, plans: Sequence[ChoicePlan], model: ServedModel
) -> tuple[str, ...]:
    """The text of each prompt, if the job requests it; for a chat, the output of the template.

    Raises `Overloaded`.
    """
    if not job.wants_prompt_text:
        return ()
    if sum(len(plan.prompt_ids) for plan in plans) <= _INLINE_SIZE:
        return _texts(job, plans, model.tokenizer)
    return await model.texts.run(job.tenant, partial(_texts, job, plans, model.tokenizer))


def provenance(
    job: GenerationJob, plans: Iterable[ChoicePlan], model: ServedModel
) -> Provenance | None:
    """The facts from which the answer is computed, if the job requests them."""
    if not job.wants_provenance:
        return None
    return Provenance(
        fingerprint=model.fingerprint,
        tokenizer=model.tokenizer_sha256,
        weight_format=model.weight_format,
        dtype=str(model.facts.get("dtype", "")),
        version=VERSION,
        started_at=time.time(),
        prompts=tuple(prompt_facts(plan.prompt_ids, plan.max_tokens) for plan in plans),
    )


def _texts(
    job: GenerationJob, plans: Iterable[ChoicePlan], tokenizer: Tokenizer
) -> tuple[str, ...]:
    return tuple(
        _text(prompt, plan.prompt_ids, _prompt_stream(prompt, job.sampling, tokenizer))
        for prompt, plan in zip(job.prompts, plans, strict=True)
    )


def _text(prompt: Prompt, prompt_ids: Sequence[int], stream: TextStream | None) -> str:
    if stream is None:
        assert isinstance(prompt, TextPrompt)
        return prompt.text
    return "".join(map(stream.push, prompt_ids)) + stream.flush()


def _prompt_stream(
    prompt: Prompt, sampling: SamplingParams, tokenizer: Tokenizer
) -> TextStream | None:
    """Makes the text of a prompt from its tokens; None if the prompt is a text."""
    if isinstance(prompt, TextPrompt):
        return None
    return tokenizer.text_stream(skips_special=sampling.skip_special_tokens)


def _size(prompt: Prompt) -> int:
    """The approximate size of a prompt, in characters or tokens."""
    match prompt:
        case ChatPrompt():
            return len(encode(prompt)) + _MESSAGE_SIZE * len(prompt.messages)
        case TextPrompt():
            return len(prompt.text)
        case TokenPrompt():
            return len(prompt.token_ids)


def _plan_long(job: GenerationJob, model: ServedModel, vocabulary: Vocabulary) -> list[ChoicePlan]:
    """The same for texts that may be too long to be tokenized."""
    return _plan(job, model, vocabulary, model.max_seq_len * model.tokenizer.max_entry_bytes)


def _plan(
    job: GenerationJob, model: ServedModel, vocabulary: Vocabulary, max_bytes: int
) -> list[ChoicePlan]:
    plans = []
    for prompt in job.prompts:
        prompt_ids = model.tokenizer.encode(_dated(prompt, job), max_bytes=max_bytes)
        room = model.max_seq_len - len(prompt_ids)
        max_tokens = job.sampling.max_tokens
        limit = model.max_seq_len if max_tokens is None else max_tokens
        # An answer that may end with the context needs room for its first token alone.
        wanted = min(limit, 1) if _may_be_cut(job.sampling) else limit
        if wanted > room:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {model.max_seq_len} tokens. However, you "
                f"requested {len(prompt_ids) + wanted} tokens ({len(prompt_ids)} in the prompt, "
                f"{wanted} in the completion).",
                param="messages" if isinstance(prompt, ChatPrompt) else "prompt",
            )
        plans.append(ChoicePlan(prompt_ids, min(limit, room), vocabulary))
    return plans if job.max_total_tokens is None else _within(job.max_total_tokens, job, plans)


def _may_be_cut(sampling: SamplingParams) -> bool:
    """Whether the answer may end before it has ``max_tokens``."""
    return sampling.max_tokens is None or sampling.clamp_max_tokens


def _within(limit: int, job: GenerationJob, plans: list[ChoicePlan]) -> list[ChoicePlan]:
    """The plans with no more tokens than the API key has for a minute. Raises `InvalidRequest`."""
    num_prompt_tokens = sum(len(plan.prompt_ids) for plan in plans)
    share = (limit - num_prompt_tokens) // job.total_choices
    may_be_cut = _may_be_cut(job.sampling)
    num_wanted = sum(
        job.num_choices * min(plan.max_tokens, 1 if may_be_cut else plan.max_tokens)
        for plan in plans
    )
    if num_prompt_tokens + num_wanted > limit:
        raise InvalidRequest(
            f"The request has {num_prompt_tokens + num_wanted} tokens ({num_prompt_tokens} in the "
            f"prompt, {num_wanted} in the completion), and this API key has {limit} tokens per "
            "minute.",
            param="max_tokens",
        )
    if not may_be_cut:
        return plans
    return [replace(plan, max_tokens=min(plan.max_tokens, share)) for plan in plans]


def _dated(prompt: Prompt, job: GenerationJob) -> Prompt:
    if not isinstance(prompt, ChatPrompt) or prompt.now:
        return prompt
    return structs.replace(prompt, now=job.created_at)


def _check(sampling: SamplingParams, model: ServedModel) -> None:
    """Raise `InvalidRequest` if the engine lacks a parameter, or if a token id is not in the
    vocabulary."""
    _check_supported(sampling, model)
    tokenizer = model.tokenizer
    _check_ids(sampling.logit_bias, "logit_bias", tokenizer)
    _check_ids(sampling.stop_token_ids, "stop_token_ids", tokenizer)
    allowed_ids = sampling.allowed_token_ids or ()
    if len(allowed_ids) > tokenizer.vocab_size:
        raise InvalidRequest(
            f"{len(allowed_ids)} token ids are more than the {tokenizer.vocab_size} of the "
            "vocabulary.",
            param="allowed_token_ids",
        )
    _check_ids(allowed_ids, "allowed_token_ids", tokenizer)


def _vocabulary(
    sampling: SamplingParams, tokenizer: Tokenizer, grammar: Grammar | None
) -> Vocabulary:
    return Vocabulary(_bad_words(sampling, tokenizer), _allowed(sampling, tokenizer), grammar)


def _check_ids(token_ids: Iterable[int], param: str, tokenizer: Tokenizer) -> None:
    unknown = [token_id for token_id in token_ids if token_id >= tokenizer.vocab_size]
    if unknown:
        raise InvalidRequest(
            f"Token id {unknown[0]} is not in the vocabulary of {tokenizer.vocab_size}.",
            param=param,
        )


def _bad_words(sampling: SamplingParams, tokenizer: Tokenizer) -> list[list[int]]:
    """The token ids of each word, both at the start of a text and within it. A tokenizer may have
    more tokens than the model, which never generates the excess."""
    texts = [text for word in sampling.bad_words for text in (word, f" {word.lstrip()}")]
    words = {tuple(tokenizer.encode_text(text)) for text in texts}
    return [list(word) for word in sorted(words) if word and max(word) < tokenizer.vocab_size]


def _allowed(sampling: SamplingParams, tokenizer: Tokenizer) -> bytes | None:
    if sampling.allowed_token_ids is None:
        return None
    return token_mask(sampling.allowed_token_ids, tokenizer.num_mask_bytes)


class ChoiceWriter:
    """Detokenizes a choice and detects its end.

    The tokens that the log already holds are replayed first, so that the text continues exactly as
    it would have without the interruption.
    """

    def __init__(
        self,
        choice: int,
        log: LogWriter,
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        *,
        max_tokens: int,
        eos_ids: frozenset[int],
    ) -> None:
        self._choice = choice
        self._log = log
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._max_tokens = max_tokens
        self._end_ids = eos_ids.union(sampling.stop_token_ids)
        self._num_cached_tokens = 0
        self._num_predicted_tokens = 0
        self._token_ids: list[int] = []
        """The tokens that no event has yet, whose texts and log probabilities follow."""
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._text = tokenizer.text_stream(
            sampling.stop,
            includes_stop=sampling.include_stop_in_output,
            skips_special=sampling.skip_special_tokens,
            min_tokens=sampling.min_tokens,
        )
        for token_id in self._chain.token_ids:
            self._push(token_id)

    @property
    def is_finished(self) -> bool:
        return self._chain.is_finished

    def close(self) -> list[Finished]:
        """The final event, if the tokens in the log already end the choice but the event is
        missing."""
        token_ids = self._chain.token_ids
        if self.is_finished:
            return []
        if self._text.stop_reason is not None:
            return [self._finish("stop")]
        if token_ids and token_ids[-1] in self._end_ids:
            return [self._finish("stop", self._stop_id(token_ids[-1]))]
        if len(token_ids) >= self._max_tokens:
            return [self._finish("length")]
        return []

    def give(self, token_ids: Sequence[int]) -> Iterator[TokenDelta | Finished]:
        """The events for the tokens with which the choice begins, as far as the log does not have
        them yet."""
        missing = self._log.missing(self._choice, token_ids)
        for start in range(0, len(missing), _MAX_EVENT_TOKENS):
            if self.is_finished:
                return
            part = missing[start : start + _MAX_EVENT_TOKENS]
            identity = SequenceId("", self._choice)
            event = self.advance([StepOutput(identity, token_id) for token_id in part])
            if event is not None:
                yield event

    def advance(
        self, outputs: Sequence[StepOutput], *, is_due: bool = True
    ) -> TokenDelta | Finished | None:
        """The event for all tokens that no event has yet; tokens after the end of the choice are
        dropped. If no event is due, there is an event only at the end of the choice."""
        for output in outputs:
            token_id = output.token_id
            self._num_cached_tokens = output.num_cached_tokens
            self._num_predicted_tokens += output.is_predicted
            self._token_ids.append(token_id)
            self._texts.append(self._push(token_id))
            if output.score is not None:
                num_chars = 0 if self._is_hidden_end(token_id) else self._text.num_completed
                scored = token_logprobs(token_id, output.score, self._tokenizer, num_chars)
                self._logprobs.append(scored)
            if self._text.stop_reason is not None:
                return self._finish("stop")
            if output.finish_reason is not None:
                return self._finish(output.finish_reason, self._stop_id(token_id))
        if not (is_due and self._token_ids):
            return None
        token_ids, texts, logprobs = self._take()
        return self._log.delta(
            self._choice,
            token_ids,
            "".join(texts),
            num_chars=[len(text) for text in texts[:-1]],
            logprobs=logprobs,
        )

    def _take(self) -> tuple[list[int], list[str], list[TokenLogprobs]]:
        taken = self._token_ids, self._texts, self._logprobs
        self._token_ids, self._texts, self._logprobs = [], [], []
        return taken

    @property
    def _chain(self) -> TokenChain:
        return self._log.chains[self._choice]

    def _push(self, token_id: int) -> str:
        return "" if self._is_hidden_end(token_id) else self._text.push(token_id)

    def _is_hidden_end(self, token_id: int) -> bool:
        """Whether the token ends the choice and is not part of its text."""
        return token_id in self._end_ids and not self._sampling.include_stop_in_output

    def _stop_id(self, token_id: int) -> int | None:
        return token_id if token_id in self._sampling.stop_token_ids else None

    def _finish(self, reason: FinishReason, stop_id: int | None = None) -> Finished:
        token_ids, texts, logprobs = self._take()
        # The held-back text may complete a stop string; after a match nothing is held back.
        text = "".join(texts) + self._text.flush()
        stop = self._text.stop_reason
        return self._log.finish(
            self._choice,
            token_ids,
            text,
            reason if stop is None else "stop",
            stop_id if stop is None else stop,
            num_cached_tokens=self._num_cached_tokens,
            num_predicted_tokens=self._num_predicted_tokens,
            num_chars=[len(text) for text in texts[:-1]],
            logprobs=logprobs,
            has_end_token=bool(token_ids) and self._is_hidden_end(token_ids[-1]),
        )


def is_long_replay(log: LogWriter, job: GenerationJob) -> bool:
    num_given = len(job.given_ids)
    return sum(max(len(chain.token_ids), num_given) for chain in log.chains) > _LONG_REPLAY


class Choices:
    """Decodes all choices of a job that are unfinished in ``log``: turns the engine's outputs into
    events.

    The tokens that the log already holds are replayed when the object is created, which takes long
    if `is_long_replay`.
    """

    def __init__(
        self, job: GenerationJob, plans: list[ChoicePlan], model: ServedModel, log: LogWriter
    ) -> None:
        self._job = job
        self._plans = plans
        self._model = model
        self._log = log
        self._writers = [self._writer(choice) for choice in range(job.total_choices)]
        # First, because given tokens that the grammar does not allow must not be in the log, after
        # whose tokens the error has its place.
        self._matchers = [self._matcher(choice) for choice in range(job.total_choices)]
        self._given = [event for writer in self._writers for event in writer.give(job.given_ids)]
        self._scorers = self._new_scorers()

    def begin(self) -> Iterator[ChoiceEvent]:
        """The events that need no further tokens: the given tokens that the log does not have yet,
        and ends that are missing."""
        yield from self._given
        for choice, writer in enumerate(self._writers):
            scorer = self._scorers.get(choice)
            if scorer is not None:
                yield from scorer.begin()
            if scorer is None or scorer.is_complete:
                yield from writer.close()

    def advance(
        self,
        outputs: Sequence[Output],
        on_end: Callable[[SequenceId], object],
        *,
        is_due: bool = True,
    ) -> Iterator[ChoiceEvent]:
        """The events for the next outputs, each as soon as it is the next event of the log; if no
        event is due, only the events of choices that end. ``on_end`` is called with the sequence of
        each choice that has ended, which may still be running."""
        by_sequence: defaultdict[SequenceId, list[Output]] = defaultdict(list)
        for output in outputs:
            by_sequence[output.sequence_id].append(output)
        for sequence_id, of_choice in by_sequence.items():
            yield from self._advance_one(sequence_id.choice, of_choice, is_due=is_due)
            if self._writers[sequence_id.choice].is_finished:
                on_end(sequence_id)
        if is_due:
            for writer in self._writers:
                # Its latest tokens may have come when no event was due.
                if not writer.is_finished and (event := writer.advance(())) is not None:
                    yield event

    def submits(self, job_class: JobClass) -> list[Submit]:
        """The sequences for all unfinished choices; the first sequence of each prompt is the
        others' leader."""
        # A unique prefix: late tokens of an earlier run of this job on this worker are ignored.
        run = f"{self._job.request_id}/{next(_RUNS)}"
        leaders: dict[int, SequenceId] = {}
        submits = []
        for choice, chain in enumerate(self._log.chains):
            if not chain.is_finished:
                sequence_id = SequenceId(run, choice)
                leader = leaders.setdefault(choice // self._job.num_choices, sequence_id)
                submits.append(
                    self._submit(
                        sequence_id,
                        tuple(chain.token_ids),
                        job_class,
                        leader=None if leader == sequence_id else leader,
                        scores_prompt=choice in self._scorers
                        and not self._scorers[choice].is_complete,
                    )
                )
        return submits

    def _advance_one(
        self, choice: int, outputs: list[Output], *, is_due: bool
    ) -> Iterator[ChoiceEvent]:
        tokens = [output for output in outputs if isinstance(output, StepOutput)]
        for output in outputs:
            if isinstance(output, PromptScored):
                yield from self._scorers[choice].add(output.scores)
        writer = self._writers[choice]
        if not tokens and self._scorers[choice].is_complete:
            yield from writer.close()
        for start in range(0, len(tokens), _MAX_EVENT_TOKENS):
            next_tokens = tokens[start : start + _MAX_EVENT_TOKENS]
            is_full = len(next_tokens) == _MAX_EVENT_TOKENS
            event = None
            if not writer.is_finished:
                event = writer.advance(next_tokens, is_due=is_due or is_full)
            if event is not None:
                yield event

    def _new_scorers(self) -> dict[int, PromptScorer]:
        """A scorer for each prompt none of whose choices has begun, by its first choice."""
        if self._job.sampling.prompt_logprobs is None:
            return {}
        num_choices, log = self._job.num_choices, self._log
        return {
            prompt * num_choices: self._scorer(prompt, plan.prompt_ids)
            for prompt, plan in enumerate(self._plans)
            if not log.chains[prompt * num_choices].is_finished
            and not any(
                chain.token_ids
                for chain in log.chains[prompt * num_choices : (prompt + 1) * num_choices]
            )
        }

    def _scorer(self, prompt: int, prompt_ids: Sequence[int]) -> PromptScorer:
        tokenizer = self._model.tokenizer
        stream = _prompt_stream(self._job.prompts[prompt], self._job.sampling, tokenizer)
        return PromptScorer(prompt, self._log, prompt_ids, tokenizer, stream)

    def _plan_of(self, choice: int) -> ChoicePlan:
        return self._plans[choice // self._job.num_choices]

    @property
    def _eos_ids(self) -> frozenset[int]:
        return frozenset() if self._job.sampling.ignore_eos else self._model.tokenizer.eos_ids

    def _writer(self, choice: int) -> ChoiceWriter:
        return ChoiceWriter(
            choice,
            self._log,
            self._model.tokenizer,
            self._job.sampling,
            max_tokens=self._plan_of(choice).max_tokens,
            eos_ids=self._eos_ids,
        )

    def _matcher(self, choice: int) -> GrammarMatcher | None:
        vocabulary, chain = self._plan_of(choice).vocabulary, self._log.chains[choice]
        if vocabulary.grammar is None or chain.is_finished:
            return None
        known_ids = max(tuple(chain.token_ids), self._job.given_ids, key=len)
        return vocabulary.grammar.matcher(known_ids, vocabulary.allowed)

    def _submit(
        self,
        sequence_id: SequenceId,
        output_ids: tuple[int, ...],
        job_class: JobClass,
        *,
        leader: SequenceId | None,
        scores_prompt: bool,
    ) -> Submit:
        plan = self._plan_of(sequence_id.choice)
        vocabulary = plan.vocabulary
        return Submit(
            sequence_id=sequence_id,
            prompt_ids=plan.prompt_ids,
            sampling=self._job.sampling,
            seed=self._job.seed,
            max_tokens=plan.max_tokens,
            eos_ids=self._eos_ids,
            output_ids=output_ids,
            job_class=job_class,
            tenant=self._job.tenant,
            leader=leader,
            scores_prompt=scores_prompt,
            bad_words=vocabulary.bad_words,
            allowed=vocabulary.allowed,
            constraint=self._matchers[sequence_id.choice],
            expected_ids=self._expected(sequence_id.choice),
        )

    def _expected(self, choice: int) -> list[int]:
        """The tokens that a choice is expected to have, without tokens that the model does not
        have, because kernels use them as indices."""
        vocab_size = self._model.tokenizer.vocab_size
        (expected,) = self._job.expected_ids[choice : choice + 1] or ((),)
        return [token_id for token_id in expected if token_id < vocab_size]
