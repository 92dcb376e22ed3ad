"""Settings come from the environment and the command line, and wrong ones stop the start."""

import pytest

from shared import settings
from shared.errors import StartupError
from shared.settings import GatewaySettings, WorkerSettings


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    return monkeypatch


def test_defaults_need_no_environment() -> None:
    assert settings.load(GatewaySettings).port == 8000
    assert settings.load(WorkerSettings).model == settings.DEFAULT_MODEL


def test_a_variable_sets_a_setting(env: pytest.MonkeyPatch) -> None:
    env.setenv("WARREN_PORT", "9000")

    assert settings.load(GatewaySettings).port == 9000


def test_the_command_line_wins_over_the_environment(env: pytest.MonkeyPatch) -> None:
    env.setenv("WARREN_PORT", "9000")

    assert settings.load(GatewaySettings, port=7000).port == 7000


def test_an_option_that_was_not_given_leaves_the_environment_alone(
    env: pytest.MonkeyPatch,
) -> None:
    env.setenv("WARREN_PORT", "9000")

    assert settings.load(GatewaySettings, port=None).port == 9000


def test_the_other_sides_variables_are_not_in_the_way(env: pytest.MonkeyPatch) -> None:
    env.setenv("WARREN_MAX_NUM_SEQS", "8")

    assert settings.load(GatewaySettings).port == 8000


def test_a_list_is_written_with_commas(env: pytest.MonkeyPatch) -> None:
    env.setenv("WARREN_CORS_ORIGINS", "https://a.example, https://b.example")

    assert settings.load(GatewaySettings).cors_origins == ("https://a.example", "https://b.example")


def test_an_unknown_variable_stops_the_start(env: pytest.MonkeyPatch) -> None:
    env.setenv("WARREN_MAX_NUM_SEQ", "8")

    with pytest.raises(StartupError, match="unknown setting WARREN_MAX_NUM_SEQ"):
        settings.load(WorkerSettings)


def test_a_bad_value_is_named_with_its_variable(env: pytest.MonkeyPatch) -> None:
    env.setenv("WARREN_MAX_NUM_SEQS", "many")

    with pytest.raises(StartupError, match=r"WARREN_MAX_NUM_SEQS: .*integer"):
        settings.load(WorkerSettings)


def test_the_brokers_password_is_in_no_text_of_the_settings(env: pytest.MonkeyPatch) -> None:
    env.setenv("WARREN_BROKER", "amqp://user:hunter2@broker/")

    assert "hunter2" not in f"{settings.load(WorkerSettings)!r}"
