import msgspec

from cli.batch.answers import output_line
from cli.batch.input_file import job_of
from gateway.batches.lines import RequestLine
from shared.messages import Choice, Completed


def test_the_usage_sums_over_the_choices() -> None:
    choices = (
        Choice(
            token_ids=(1, 2),
            text="a",
            finish_reason="stop",
            num_prompt_tokens=num_prompt_tokens,
            num_cached_tokens=num_cached_tokens,
        )
        for num_prompt_tokens, num_cached_tokens in ((20, 16), (40, 32))
    )
    body = msgspec.Raw(b'{"model": "m", "prompt": ["x", "y"]}')
    line = RequestLine(custom_id="row", url="/v1/completions", body=body)
    completed = Completed(request_id="r", choices=tuple(choices))

    answer = msgspec.json.decode(output_line("row", job_of(line, "r", 0.0), completed))

    assert answer["response"]["body"]["usage"] == {
        "prompt_tokens": 60,
        "completion_tokens": 4,
        "total_tokens": 64,
        "prompt_tokens_details": {"cached_tokens": 48, "cache_write_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0, "accepted_prediction_tokens": 0},
    }
