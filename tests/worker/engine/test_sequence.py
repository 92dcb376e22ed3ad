from tests.support.models.engine import new_submit
from worker.engine.interface import Submit
from worker.engine.sequence import Sequence

TABLES = [[4, 2, 9]]


def new_sequence(submit: Submit) -> Sequence:
    return Sequence(submit, arrival=0)


def test_only_the_last_chunk_of_a_prompt_is_sampled() -> None:
    sequence = new_sequence(new_submit(num_prompt=5))

    first = sequence.take(3, row=0, block_tables=TABLES)
    last = sequence.take(2, row=0, block_tables=TABLES)

    assert (first.start, first.num_tokens, first.is_sampled) == (0, 3, False)
    assert (last.start, last.num_tokens, last.is_sampled) == (3, 2, True)
    assert [*first.token_ids, *last.token_ids] == list(sequence.submit.prompt_ids)


def test_a_decode_whose_token_is_on_its_way_names_its_row() -> None:
    sequence = new_sequence(new_submit(num_prompt=5))
    sequence.take(5, row=3, block_tables=TABLES)

    decode = sequence.take(1, row=0, block_tables=TABLES)

    assert (decode.previous_row, decode.start, decode.num_tokens) == (3, 5, 1)


def test_a_decode_whose_token_is_known_has_it() -> None:
    sequence = new_sequence(new_submit(num_prompt=5))
    sequence.take(5, row=3, block_tables=TABLES)
    sequence.append(11)

    decode = sequence.take(1, row=0, block_tables=TABLES)

    assert (decode.previous_row, decode.token_ids) == (None, [11])


def test_the_drawn_token_has_its_position_among_the_output() -> None:
    sequence = new_sequence(new_submit(num_prompt=5, output_ids=[1, 2], max_tokens=9))

    assert sequence.take(7, row=0, block_tables=TABLES).position == 2
    assert sequence.take(1, row=0, block_tables=TABLES).position == 3


def test_it_is_complete_as_soon_as_its_last_token_is_on_its_way() -> None:
    sequence = new_sequence(new_submit(num_prompt=5, max_tokens=1))

    sequence.take(5, row=0, block_tables=TABLES)

    assert sequence.is_complete


def test_it_ends_by_length_at_max_tokens() -> None:
    sequence = new_sequence(new_submit(max_tokens=2))

    assert [sequence.append(1), sequence.append(1)] == [None, "length"]


def test_it_ends_by_stop_at_an_eos_id_even_when_that_is_the_last_token() -> None:
    sequence = new_sequence(new_submit(max_tokens=2, eos_ids=frozenset([9])))

    assert [sequence.append(1), sequence.append(9)] == [None, "stop"]


def test_an_ignored_eos_id_is_a_token_like_any_other() -> None:
    sequence = new_sequence(new_submit(max_tokens=2, eos_ids=frozenset([9]), ignore_eos=True))

    assert [sequence.append(9), sequence.append(9)] == [None, "length"]


def test_batch_comes_after_interactive_whatever_came_first() -> None:
    batch = Sequence(new_submit(job_class="batch"), arrival=0)
    early, late = (Sequence(new_submit(), arrival=k) for k in (1, 2))

    ordered = sorted([batch, late, early], key=lambda sequence: sequence.priority)

    assert ordered == [early, late, batch]
