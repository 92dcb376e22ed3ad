"""How long jobs take, learned from ended jobs."""

import pytest
from msgspec.structs import replace

from shared.messages import Constraint, GenerationJob, SamplingParams, TokenPrompt
from worker.jobs.pace import JobPace, least_tokens

EXACT = SamplingParams(max_tokens=100, ignore_eos=True)


def job_of(sampling: SamplingParams = EXACT, num_prompt_tokens: int = 10) -> GenerationJob:
    prompt = TokenPrompt(token_ids=(1,) * num_prompt_tokens)
    return GenerationJob(request_id="r", model="m", prompts=(prompt,), sampling=sampling)


def pace_of(token_s: float, num_tokens: int = 101, num_jobs: int = 8) -> JobPace:
    pace = JobPace()
    for _ in range(num_jobs):
        pace.learn_answer(num_tokens, token_s * (num_tokens - 1))
    return pace


@pytest.mark.parametrize("pace", [JobPace(), pace_of(0.1, num_jobs=7)])
def test_nothing_is_known_before_some_jobs_have_ended(pace: JobPace) -> None:
    assert (pace.expected_s(job_of()), pace.least_s(job_of())) == (0, 0)


def test_a_job_takes_the_mean_time_of_the_last_jobs_for_each_token() -> None:
    pace = pace_of(0.1)
    for _ in range(8):
        pace.learn_prompt(1000, 2.0)
        pace.learn_answer(101, 30.0)

    assert pace.expected_s(job_of(num_prompt_tokens=500)) == pytest.approx(100 * 0.2 + 500 * 0.002)


def test_an_answer_that_may_end_early_has_the_usual_length() -> None:
    pace = pace_of(0.1, num_tokens=41)

    lengths = [replace(EXACT, ignore_eos=False), SamplingParams(), SamplingParams(max_tokens=20)]
    assert [pace.expected_s(job_of(one)) for one in lengths] == pytest.approx([4.1, 4.1, 2.0])


def test_a_job_needs_half_of_the_time_of_the_fastest() -> None:
    pace = pace_of(0.3)
    pace.learn_answer(11, 2.0)

    assert pace.least_s(job_of()) == pytest.approx(100 * 0.2 / 2)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_tokens=100),
        replace(EXACT, stop=("end",)),
        replace(EXACT, stop_token_ids=(7,)),
        replace(EXACT, constraint=Constraint(kind="regex", source="a*")),
        replace(EXACT, clamp_max_tokens=True),
    ],
)
def test_an_answer_that_may_end_at_once_needs_no_time(sampling: SamplingParams) -> None:
    assert least_tokens(job_of(sampling)) == 0
    assert least_tokens(job_of(replace(sampling, min_tokens=30))) == 30


def test_tokens_that_a_request_continues_are_not_generated_again() -> None:
    job = replace(job_of(), given_ids=(5,) * 60)

    assert least_tokens(job) == 40
    assert pace_of(0.1).expected_s(job) == pytest.approx(4.0)


def test_short_prompts_and_answers_say_nothing_about_the_time_for_each_token() -> None:
    pace = pace_of(0.1)
    for _ in range(20):
        pace.learn_prompt(10, 2.0)
        pace.learn_answer(1, 0.0)

    assert pace.expected_s(job_of()) == pytest.approx(10.0)
