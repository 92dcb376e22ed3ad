"""The layout of a step, and the single copy that moves it."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from shared.messages import SamplingParams
from tests.support.models.batches import batch, share
from worker.engine.cache.layout import FullCache, StateCache
from worker.engine.interface import ScheduledBatch
from worker.model.cache_layout import CacheLayout, LayerPlace
from worker.model.inputs import NO_SLOT, build_inputs, lay_out
from worker.model.sampling.sampler import uniform
from worker.model.transfer import Packed

CPU = torch.device("cpu")


def test_single_tokens_come_first_and_results_keep_the_order_of_the_batch() -> None:
    chunk = share([10, 11, 12], [7, 2], start=3, is_sampled=True)
    decode = share([20], [5], start=1)
    part = share([30, 31], [4], is_sampled=False)
    last = share([40], [1, 6, 3], start=9)

    inputs = build_inputs(batch(chunk, decode, part, last), 4, CPU)

    forward = inputs.forward
    assert forward.token_ids.tolist() == [20, 40, 10, 11, 12, 30, 31]
    assert forward.positions.tolist() == [1, 9, 3, 4, 5, 0, 1]
    assert forward.slots.tolist() == [[21, 13, 31, 8, 9, 16, 17]]
    assert forward.query_starts.tolist() == [0, 1, 2, 5, 7]
    assert forward.context_lens.tolist() == [2, 10, 6, 2]
    assert forward.block_tables.tolist() == [[[5, 0, 0], [1, 6, 3], [7, 2, 0], [4, 0, 0]]]
    assert forward.sampled_rows.tolist() == [4, 0, 1]
    assert (forward.num_decodes, forward.max_query_len) == (2, 3)
    assert inputs.sampling is None


def test_types_are_those_that_the_ops_take() -> None:
    forward = build_inputs(batch(share([1, 2], [0])), 4, CPU).forward
    assert {forward.token_ids.dtype, forward.positions.dtype, forward.slots.dtype} == {torch.int64}
    assert forward.sampled_rows.dtype == torch.int64
    assert forward.query_starts.dtype == forward.context_lens.dtype == torch.int32
    assert forward.block_tables.dtype == torch.int32


def test_blocks_beyond_the_context_are_left_out() -> None:
    forward = build_inputs(batch(share([1], [3, 9, 9, 9])), 4, CPU).forward
    assert forward.block_tables.tolist() == [[[3]]]


def test_tokens_of_the_previous_step_are_found_by_place_and_row() -> None:
    chunk = share([1, 2], [0])
    known = share([3], [1])
    carried = share([0], [2], previous_row=5)
    also_carried = share([8, 0], [3], previous_row=2)

    inputs = build_inputs(batch(chunk, known, carried, also_carried), 4, CPU)

    assert inputs.carried_tokens.tolist() == [1, 5]
    assert inputs.carried_rows.tolist() == [5, 2]


def test_states_that_are_read_stand_before_those_that_are_written() -> None:
    layout = CacheLayout(
        groups=[FullCache(), StateCache(num_blocks=2, every=4)],
        places=[LayerPlace(0, 0), None],
        key_blocks=[1, 1],
        num_places=1,
        states=[None, 0],
    )
    decode = share([1], [6, 7], start=5, states=[2, 3, 8, 9])
    begun = share([2, 3], [1], states=[4, 5])

    inputs = build_inputs(batch(decode, begun), 4, CPU, layout).forward

    assert inputs.block_tables.tolist() == [
        [[6, 7, 0, 0], [1, 0, 0, 0]],
        [[2, 3, 8, 9], [0, 0, 4, 5]],
    ]
    assert inputs.slots[0].tolist() == [29, 4, 5]
    assert inputs.slots[1].tolist() == [NO_SLOT] * 3
    for blocks in ([2, 3], [2, 3, 8]):
        with pytest.raises(ValueError, match="blocks of states, expected 4"):
            build_inputs(batch(share([1], [6, 7], start=5, states=blocks)), 4, CPU, layout)


def test_drafts_have_rows_of_their_own_with_the_positions_that_follow() -> None:
    sampling = SamplingParams(temperature=0.5)
    decode = share([1], [0], start=1, sampling=sampling, seed=5, position=2)
    drafted = share(
        [0, 21, 22],
        [1, 2],
        start=3,
        sampling=sampling,
        seed=6,
        position=7,
        num_drafts=2,
        previous_row=4,
    )
    prompt = share([31, 32], [3], is_sampled=False)
    last = share([41, 42], [4], sampling=sampling, seed=8)

    inputs = build_inputs(batch(decode, drafted, prompt, last), 4, CPU)

    assert inputs.forward.token_ids.tolist() == [1, 0, 21, 22, 31, 32, 41, 42]
    assert inputs.forward.sampled_rows.tolist() == [0, 1, 2, 3, 7]
    assert inputs.carried_tokens.tolist() == [1]
    assert inputs.sampling is not None
    draws = [(5, 2), (6, 7), (6, 8), (6, 9), (8, 0)]
    expected = [uniform(seed, 0, position) for seed, position in draws]
    assert inputs.sampling.uniforms.tolist() == expected


def test_sampling_lists_the_sampled_rows_and_which_are_filtered() -> None:
    warm = SamplingParams(temperature=0.5)
    nucleus = SamplingParams(temperature=1.5, top_p=0.5, top_k=7)
    greedy_with_k = SamplingParams(temperature=0.0, top_k=4)
    shares = batch(
        share([1], [0], sampling=warm, seed=3, choice=2, position=9),
        share([1, 2], [1], sampling=nucleus, is_sampled=False),
        share([1], [2], sampling=greedy_with_k),
        share([1], [3], sampling=nucleus, seed=4),
    )

    sampling = build_inputs(shares, 4, CPU).sampling

    assert sampling is not None
    assert sampling.temperatures.tolist() == [0.5, 0.0, 1.5]
    assert sampling.top_ks.tolist() == [0, 4, 7]
    assert sampling.top_ps.tolist() == [1.0, 1.0, 0.5]
    assert sampling.uniforms.tolist() == [uniform(3, 2, 9), uniform(0, 0, 0), uniform(4, 0, 0)]
    assert sampling.filtered_rows.tolist() == [2]


def test_a_step_that_only_decodes_is_padded_for_its_graph() -> None:
    shares = batch(share([5], [2, 1], start=5), share([0], [3], start=1, previous_row=4))

    step = lay_out(shares, 4, CPU, graph_size=lambda num_seqs: 2 * num_seqs)

    assert (step.graph_size, step.num_sampled, step.num_previous) == (4, 2, 5)
    inputs = step.send()
    forward = inputs.forward
    assert forward.token_ids.tolist() == [5, 0, 0, 0]
    assert forward.positions.tolist() == [5, 1, 0, 0]
    assert forward.slots.tolist() == [[5, 13, -1, -1]]
    assert forward.query_starts.tolist() == [0, 1, 2, 3, 4]
    assert forward.context_lens.tolist() == [6, 2, 0, 0]
    assert forward.block_tables.tolist() == [[[2, 1], [3, 0], [0, 0], [0, 0]]]
    assert (forward.num_decodes, forward.max_query_len) == (4, 1)
    assert inputs.carried_tokens.tolist() == [1]


@pytest.mark.parametrize(
    "shares",
    [
        batch(share([1], [0]), share([1, 2], [1])),
        batch(share([1], [0]), share([1], [1], is_sampled=False)),
    ],
)
def test_a_step_that_does_more_has_no_graph(shares: ScheduledBatch) -> None:
    step = lay_out(shares, 4, CPU, graph_size=lambda num_seqs: 8)
    assert step.graph_size is None
    assert len(step.send().forward.context_lens) == 2


def test_a_batch_that_cannot_be_computed_is_refused() -> None:
    with pytest.raises(ValueError, match="without sequences"):
        build_inputs(batch(), 4, CPU)
    with pytest.raises(ValueError, match="2 tokens up to position 5 in 1 blocks of 4"):
        build_inputs(batch(share([1, 2], [0], start=3)), 4, CPU)
    with pytest.raises(ValueError, match="0 tokens"):
        build_inputs(batch(share([], [0])), 4, CPU)


def test_a_transfer_keeps_values_shapes_and_types() -> None:
    arrays: dict[str, NDArray[Any]] = {
        "odd": np.arange(3, dtype=np.int32),
        "none": np.zeros(0, np.int64),
        "matrix": np.arange(6, dtype=np.int64).reshape(2, 3).T,
        "floats": np.array([0.1], np.float32),
    }
    tensors = Packed(arrays, CPU).send()
    for name, array in arrays.items():
        assert torch.equal(tensors[name], torch.tensor(array))
        assert tensors[name].dtype == torch.tensor(array).dtype
