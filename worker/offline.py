"""Runs a model inside of a program, without a broker and without a service: `LLM`."""

import secrets
import sys
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from queue import Empty, SimpleQueue
from threading import Lock
from types import TracebackType
from typing import Any, Self, TypeAlias

from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from shared.client.prompts import (
    Chats,
    PromptLike,
    ToolLike,
    chat_prompts,
    checked,
    prompts_of,
)
from shared.errors import InternalError, InvalidRequest, StartupError
from shared.messages import (
    Completed,
    Finished,
    GenerationJob,
    Prompt,
    SamplingParams,
    TextPrompt,
    TokenDelta,
)
from shared.settings import DEFAULT_MODEL, ModelSettings, did_you_mean, refusal
from worker.checkpoints import store
from worker.checkpoints.progress import LoggedProgress
from worker.decode.choices import ChoicePlan, Choices, plan_now
from worker.decode.embedding import embedder_of, embedding_prompt
from worker.decode.served_model import ServedModel, load
from worker.decode.whole_answer import ChoiceEvent, WholeAnswer
from worker.engine.interface import (
    CancelSequence,
    Charges,
    Output,
    SequenceFailed,
    SequenceId,
    TokenEngine,
)

_DEFAULT = SamplingParams()
_MAX_SEQUENCES = 512
"""Sequences of a call that run or wait in the engine. The other prompts of the call follow."""

EngineNews: TypeAlias = Output | SequenceFailed | BaseException
"""A message of the engine thread to a call; an exception ends all calls."""


class LLM:
    """A model in this process.

    Several threads may use it: their requests run in the same batches. The model is unloaded by
    `close`, at the end of a ``with``, or with the program.
    """

    def __init__(self, model: str = DEFAULT_MODEL, **options: Any) -> None:
        """``model`` is a known name, a model directory, a GGUF file or a Hugging Face Hub id. It is
        downloaded if necessary.

        ``options`` are the settings of `ModelSettings`, such as ``device``, ``weight_format``,
        ``kv_cache_bytes`` and ``max_seq_len``; ``docs/configuration.md`` describes them. The
        environment is not read. Raises `StartupError`.
        """
        self._model = _loaded(model, options)
        self._routes = _Routes(self._model.engine)
        self._planning = Lock()
        self._close = weakref.finalize(self, self._routes.engine.stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unload the model. Requests that are running end with an error."""
        self._close()
        self._routes.hear_failure(InternalError("The model has been closed."))

    @property
    def name(self) -> str:
        """The name of the model."""
        return self._model.name

    @property
    def max_seq_len(self) -> int:
        """Maximum length of prompt and output together, in tokens."""
        return self._model.max_seq_len

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling: SamplingParams = _DEFAULT,
        *,
        num_choices: int = 1,
        progress: bool = True,
    ) -> list[Completed]:
        """Continue each prompt; the answers are in the order of the prompts.

        ``answer.text`` is the text of the first choice, and ``answer.choices`` has all
        ``num_choices``. A progress bar is shown on a terminal unless ``progress`` is false.

        Raises `InvalidRequest` or `ContextLengthExceeded` before anything runs, and the error of a
        prompt whose answer fails; the others are then cancelled.
        """
        return self._answers(self._planned(prompts_of(prompts), sampling, num_choices), progress)

    def chat(
        self,
        conversations: Chats,
        sampling: SamplingParams = _DEFAULT,
        *,
        tools: Sequence[ToolLike] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        num_choices: int = 1,
        progress: bool = True,
    ) -> list[Completed]:
        """Answer one conversation or several, as `generate` continues prompts.

        ``template_kwargs`` are further variables of the chat template, such as
        ``enable_thinking``. Reasoning and calls of ``tools`` are part of the text, in the format of
        the model.
        """
        prompts = chat_prompts(conversations, tools, template_kwargs)
        return self._answers(self._planned(prompts, sampling, num_choices), progress)

    def stream(
        self,
        prompt: PromptLike,
        sampling: SamplingParams = _DEFAULT,
        *,
        num_choices: int = 1,
    ) -> Iterator[TokenDelta | Finished]:
        """Continue a prompt, and yield the text of each choice as it is generated.

        An iterator that is closed cancels the request. Raises as `generate` does.
        """
        (planned,) = self._planned(prompts_of(prompt), sampling, num_choices)
        return self._events(*planned)

    def stream_chat(
        self,
        conversation: Chats,
        sampling: SamplingParams = _DEFAULT,
        *,
        tools: Sequence[ToolLike] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        num_choices: int = 1,
    ) -> Iterator[TokenDelta | Finished]:
        """Answer a conversation as `stream` continues a prompt."""
        prompts = chat_prompts(conversation, tools, template_kwargs)
        if len(prompts) != 1:
            raise InvalidRequest("Only one conversation can be streamed.", param="messages")
        return self._events(*self._planned(prompts, sampling, num_choices)[0])

    def embed(
        self, texts: str | Sequence[str], num_dimensions: int | None = None
    ) -> list[tuple[float, ...]]:
        """A vector of length 1 for each text, cut off after ``num_dimensions``. Raises
        `InvalidRequest` if the model has no embeddings."""
        embedder = embedder_of(self._model, num_dimensions)
        prompts = [
            embedding_prompt(TextPrompt(text=text), self._model)
            for text in ([texts] if isinstance(texts, str) else texts)
        ]
        vectors: list[tuple[float, ...]] = []
        steps = embedder.embed(prompts, num_dimensions)
        while (more := embedder.submit(steps).result()) is not None:
            vectors += more
        return vectors

    def tokenize(self, prompt: PromptLike) -> list[int]:
        """The token ids of a prompt."""
        (one,) = prompts_of(prompt)
        return self._model.tokenizer.encode(one)

    def _planned(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, num_choices: int
    ) -> "list[tuple[GenerationJob, list[ChoicePlan]]]":
        planned = []
        for prompt in prompts:
            job = checked(
                GenerationJob(
                    request_id=f"offline.{secrets.token_hex(16)}",
                    model=self.name,
                    prompts=(prompt,),
                    sampling=sampling,
                    num_choices=num_choices,
                )
            )
            with self._planning:
                planned.append((job, plan_now(job, self._model)))
        return planned

    def _answers(
        self, planned: "Sequence[tuple[GenerationJob, list[ChoicePlan]]]", progress: bool
    ) -> list[Completed]:
        waiting, runs = deque(planned), []
        with _LocalRuns(self._model, self._routes) as call, _bar(is_shown=progress) as bar:
            task, num_tokens = bar.add_task("", total=len(planned), rate=0.0), 0
            while waiting or call.is_running:
                while waiting and call.num_sequences < _MAX_SEQUENCES:
                    runs.append(call.start(*waiting.popleft()))
                num_tokens += call.wait()
                elapsed_s = bar.tasks[task].elapsed or 0.0
                num_ended = sum(run.is_ended for run in runs)
                bar.update(task, completed=num_ended, rate=num_tokens / (elapsed_s or 1.0))
        return [run.completed() for run in runs]

    def _events(
        self, job: GenerationJob, plans: list[ChoicePlan]
    ) -> Iterator[TokenDelta | Finished]:
        if job.sampling.prompt_logprobs is not None:
            raise InvalidRequest("A stream has no prompt_logprobs.", param="prompt_logprobs")
        return self._run(job, plans)

    def _run(self, job: GenerationJob, plans: list[ChoicePlan]) -> Iterator[TokenDelta | Finished]:
        with _LocalRuns(self._model, self._routes) as call:
            run = call.start(job, plans)
            while True:
                for event in run.take():
                    if isinstance(event, TokenDelta | Finished):
                        yield event
                if run.is_ended:
                    return
                call.wait()


class _Routes:
    """Listens to the engine, and tells each call the news of its sequences."""

    def __init__(self, engine: TokenEngine) -> None:
        self.engine = engine
        self._inboxes: dict[SequenceId, SimpleQueue[EngineNews]] = {}
        self._failure: BaseException | None = None
        engine.start(self)

    def add(self, sequence_id: SequenceId, inbox: "SimpleQueue[EngineNews]") -> None:
        self._inboxes[sequence_id] = inbox
        if self._failure is not None:
            inbox.put(self._failure)

    def remove(self, sequence_id: SequenceId) -> None:
        self._inboxes.pop(sequence_id, None)

    def hear_outputs(self, outputs: Sequence[Output], charges: Charges) -> None:
        self._tell(outputs)

    def hear_failed(self, failed: Sequence[SequenceFailed]) -> None:
        self._tell(failed)

    def hear_ready(self, is_ready: bool) -> None:
        """Calls wait while the engine is away."""

    def hear_failure(self, error: BaseException) -> None:
        """End all calls, and all later calls."""
        self._failure = self._failure or error
        for inbox in {id(inbox): inbox for inbox in list(self._inboxes.values())}.values():
            inbox.put(self._failure)

    def _tell(self, news: Sequence[Output | SequenceFailed]) -> None:
        for one in news:
            if (inbox := self._inboxes.get(one.sequence_id)) is not None:
                inbox.put(one)


class _Run:
    """A job in the engine: its events, and the answer that they add up to."""

    def __init__(self, job: GenerationJob, plans: list[ChoicePlan], model: ServedModel) -> None:
        self._answer = WholeAnswer(job)
        self._plans = plans
        self.choices = Choices(job, plans, model, self._answer.log)
        self._events: list[ChoiceEvent] = []

    @property
    def is_ended(self) -> bool:
        return all(chain.is_finished for chain in self._answer.log.chains)

    def put(self, event: ChoiceEvent) -> None:
        self._answer.keep([event])
        self._events.append(event)

    def take(self) -> list[ChoiceEvent]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events

    def completed(self) -> Completed:
        return self._answer.completed([len(plan.prompt_ids) for plan in self._plans], ())


class _LocalRuns:
    """The jobs that a call of a program runs, which all end with it."""

    def __init__(self, model: ServedModel, routes: _Routes) -> None:
        self._model = model
        self._routes = routes
        self._inbox: SimpleQueue[EngineNews] = SimpleQueue()
        self._runs: dict[SequenceId, _Run] = {}
        """The run of each sequence that has not ended."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for sequence_id in list(self._runs):
            self._end(sequence_id)

    @property
    def num_sequences(self) -> int:
        return len(self._runs)

    @property
    def is_running(self) -> bool:
        return bool(self._runs)

    def start(self, job: GenerationJob, plans: list[ChoicePlan]) -> _Run:
        run = _Run(job, plans, self._model)
        for event in run.choices.begin():
            run.put(event)
        # Batch jobs have no step limit, which protects the streams of a service.
        for submit in run.choices.submits("batch"):
            self._runs[submit.sequence_id] = run
            self._routes.add(submit.sequence_id, self._inbox)
            self._routes.engine.send(submit)
        return run

    def wait(self) -> int:
        """Wait for tokens, and decode all that have arrived; returns their number. Raises the error
        of a run or of the engine."""
        if not self._runs:
            return 0
        outputs: dict[int, tuple[_Run, list[Output]]] = {}
        num_outputs = 0
        for news in self._arrived():
            if isinstance(news, BaseException):
                raise InternalError("The engine has failed: load the model again.") from news
            if (run := self._runs.get(news.sequence_id)) is None:
                continue
            if isinstance(news, SequenceFailed):
                raise news.error
            outputs.setdefault(id(run), (run, []))[1].append(news)
            num_outputs += 1
        for run, arrived in outputs.values():
            for event in run.choices.advance(arrived, self._end):
                run.put(event)
        return num_outputs

    def _arrived(self) -> Iterator[EngineNews]:
        yield self._inbox.get()
        while True:
            try:
                yield self._inbox.get_nowait()
            except Empty:
                return

    def _end(self, sequence_id: SequenceId) -> None:
        """Forget a sequence, and cancel it unless it has ended."""
        if self._runs.pop(sequence_id, None) is not None:
            self._routes.remove(sequence_id)
            self._routes.engine.send(CancelSequence(sequence_id))


def _loaded(model: str, options: Mapping[str, Any]) -> ServedModel:
    for name in options.keys() - ModelSettings.model_fields.keys():
        meant = did_you_mean(name, ModelSettings.model_fields)
        raise StartupError(f"a model has no setting {name}{meant}")
    try:
        settings = ModelSettings(model=model, **options)
    except ValidationError as error:
        raise refusal(error, str) from None
    store.pull(model, LoggedProgress())
    return load(settings)


def _bar(*, is_shown: bool) -> Progress:
    console = Console(file=sys.stderr)
    return Progress(
        TextColumn("Answers"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:.0f} tokens/s"),
        TimeRemainingColumn(),
        console=console,
        disable=not (is_shown and console.is_terminal),
    )
