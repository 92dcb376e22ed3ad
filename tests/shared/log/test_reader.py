"""A copy of a log makes every reader come to the same stream."""

from hypothesis import given
from hypothesis import strategies as st

from shared.log import LogCopy, LogReader, LogWriter, Relay, TokenChain
from shared.messages import (
    Accepted,
    Finished,
    HandedOver,
    PromptScores,
    ReplyEvent,
    Restored,
    Started,
    TokenDelta,
)


def started(ticket: str, num_returns: int = 0) -> Started:
    return Started(
        worker=f"worker.{ticket}",
        ticket=ticket,
        num_prompt_tokens=(3,),
        is_waiting=num_returns > 0,
        num_returns=num_returns,
    )


def written(pieces: list[list[int]], num_choices: int = 1, crash_at: int = -1) -> list[ReplyEvent]:
    """A log whose tokens come in these pieces, to each choice in turn."""
    writer = LogWriter(1, num_choices)
    log: list[ReplyEvent] = [Accepted(body_hash="h"), started("t")]
    for number, piece in enumerate(pieces):
        if number == crash_at:
            log += [HandedOver(ticket="t"), started("u", num_returns=1)]
            writer.attempt = 2
        counts = [1 + token_id % 3 for token_id in piece]
        text = "".join(
            chr(97 + token_id % 26) * n for token_id, n in zip(piece, counts, strict=True)
        )
        log.append(writer.delta(number % num_choices, piece, text, num_chars=counts[:-1]))
    return log


def copied(log: list[ReplyEvent]) -> Restored:
    """A copy of everything that counts in ``log``."""
    reader, copy = LogReader("r", 2), LogCopy()
    for event in log:
        actions = reader.read(event)
        match event:
            case Accepted() | Started() | HandedOver():
                copy.keep(event)
            case PromptScores() | TokenDelta() | Finished() if actions:
                copy.keep(event)
    return copy.restored()


def what_is_known(reader: LogReader) -> dict[str, object]:
    """All that a reader has learned, but for the number of events that it took."""
    return {name: value for name, value in vars(reader).items() if name != "ordinal"}


PIECES = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=5), max_size=150)


@given(PIECES, st.integers(1, 2), st.integers(-1, 20))
def test_a_reader_of_the_copy_knows_what_a_reader_of_the_log_knows(
    pieces: list[list[int]], num_choices: int, crash_at: int
) -> None:
    log = written(pieces, num_choices, crash_at)
    reader, heir = LogReader("r", 2), LogReader("r", 2, is_renewed=True)

    for event in log:
        reader.read(event)
    actions = heir.read(copied(log))

    assert what_is_known(heir) == what_is_known(reader)
    assert all(isinstance(action, Relay) for action in actions)


@given(PIECES)
def test_joined_events_say_the_same_of_each_token(pieces: list[list[int]]) -> None:
    said = [event for event in copied(written(pieces)).events if isinstance(event, TokenDelta)]

    token_ids = [token_id for event in said for token_id in event.token_ids]
    counts = [
        n for event in said for n in (*event.num_chars, len(event.text) - sum(event.num_chars))
    ]
    assert token_ids == [token_id for piece in pieces for token_id in piece]
    assert counts == [1 + token_id % 3 for token_id in token_ids]


def test_nothing_counts_before_the_copy_and_no_second_one() -> None:
    log = written([[1, 2], [3]])
    restored, [*_, later] = copied(log[:-1]), log
    reader = LogReader("r", 1, is_renewed=True)

    ignored = [action for event in log for action in reader.read(event)]
    reader.read(restored)
    reader.read(Restored(events=()))
    reader.read(later)

    assert ignored == []
    assert reader.chains == [_chain([1, 2, 3])]


def test_a_copy_in_another_log_is_ignored() -> None:
    reader = LogReader("r", 1)

    assert reader.read(copied(written([[1]]))) == []


def test_a_long_log_is_copied_in_few_events() -> None:
    restored = copied(written([[k] for k in range(5000)]))

    assert len(restored.events) < 20


def _chain(token_ids: list[int]) -> TokenChain:
    chain = TokenChain()
    chain.extend(token_ids)
    return chain
