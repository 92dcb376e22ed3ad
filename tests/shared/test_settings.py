"""Settings come from the environment and the command line, and wrong settings stop the start."""

import re
from ipaddress import ip_address
from pathlib import Path

import pytest

from shared import settings
from shared.errors import StartupError
from shared.settings import CommonSettings, GatewaySettings, ModelSettings, WorkerSettings

MAX_SETTINGS = 60
_ADVICE = re.compile(r"\b(?:[Rr]aise|[Ll]ower|[Kk]eep|[Ss]et)\b")


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    return monkeypatch


def test_defaults_need_no_environment() -> None:
    assert settings.load(GatewaySettings).port == 8000
    assert settings.load(WorkerSettings).model == settings.DEFAULT_MODEL


def test_other_machines_do_not_reach_a_workers_health_port_by_default() -> None:
    listener = settings.load(WorkerSettings, health_port="8001").health_port

    assert listener is not None
    assert ip_address(listener.host).is_loopback
    assert listener.port == 8001


@pytest.mark.parametrize(
    ("text", "host"), [("0.0.0.0:8001", "0.0.0.0"), ("[::]:8001", "::"), ("w1:8001", "w1")]
)
def test_a_health_port_may_have_an_address(env: pytest.MonkeyPatch, text: str, host: str) -> None:
    env.setenv("WARREN_HEALTH_PORT", text)

    assert settings.load(WorkerSettings).health_port == (host, 8001)


@pytest.mark.parametrize(
    ("num_slots", "num_reserved"), [(1, 0), (2, 1), (16, 1), (64, 4), (256, 16)]
)
def test_batch_jobs_leave_a_sixteenth_of_the_slots(num_slots: int, num_reserved: int) -> None:
    assert settings.load(WorkerSettings, max_num_seqs=num_slots).batch_reserve == num_reserved


def test_a_program_uses_all_slots() -> None:
    assert ModelSettings(max_num_seqs=64).batch_reserve == 0


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


def test_weights_are_read_by_name(env: pytest.MonkeyPatch) -> None:
    env.setenv("WARREN_TENANT_WEIGHTS", "alice=3, bob.example=0.5")

    assert settings.load(WorkerSettings).tenant_weights == {"alice": 3.0, "bob.example": 0.5}


@pytest.mark.parametrize("weights", ["alice", "alice=0", "alice=-1", "alice=inf", "alice=many"])
def test_a_weight_is_a_positive_number(weights: str) -> None:
    with pytest.raises(StartupError, match="--tenant-weights"):
        settings.load(WorkerSettings, tenant_weights=weights)


def test_an_unknown_variable_stops_the_start(env: pytest.MonkeyPatch) -> None:
    env.setenv("WARREN_MAX_NUM_SEQ", "8")

    with pytest.raises(StartupError, match="unknown setting WARREN_MAX_NUM_SEQ"):
        settings.load(WorkerSettings)


@pytest.mark.parametrize("name", settings.REMOVED)
def test_a_removed_variable_stops_the_start_and_says_what_replaces_it(
    env: pytest.MonkeyPatch, name: str
) -> None:
    env.setenv(settings.variable(name), "8")

    with pytest.raises(StartupError) as refused:
        settings.load(WorkerSettings)

    expected = f"{settings.variable(name)} was removed: {settings.REMOVED[name]}"
    assert str(refused.value) == expected


def test_no_removed_setting_exists_again() -> None:
    assert not settings.REMOVED.keys() & {
        *GatewaySettings.model_fields,
        *WorkerSettings.model_fields,
    }


def test_the_number_of_settings_does_not_grow() -> None:
    """A value that nobody chooses better than the program belongs into a tuning."""
    names = {*GatewaySettings.model_fields, *WorkerSettings.model_fields}

    assert len(names) <= MAX_SETTINGS


@pytest.mark.parametrize(
    ("text", "days"),
    [("30", (30, 400, 1)), ("7,usage=90", (7, 90, 1)), (" answers=0.5 , 3", (3, 400, 0.5))],
)
def test_each_kind_of_stored_object_has_its_days(
    text: str, days: tuple[float, float, float], env: pytest.MonkeyPatch
) -> None:
    env.setenv("WARREN_RETENTION_DAYS", text)

    kept = settings.load(GatewaySettings).retention_days

    assert (kept.files, kept.usage, kept.answers) == days


@pytest.mark.parametrize("text", ["", "x", "0", "30,logs=4", "usage=", "30,31", "usage=1,usage=2"])
def test_days_of_an_unknown_kind_or_without_a_number_are_refused(text: str) -> None:
    with pytest.raises(StartupError, match="--retention-days: "):
        settings.load(GatewaySettings, retention_days=text)


def test_a_bad_value_is_named_with_its_variable(env: pytest.MonkeyPatch) -> None:
    env.setenv("WARREN_MAX_NUM_SEQS", "many")

    with pytest.raises(StartupError, match="WARREN_MAX_NUM_SEQS: 'many' is not an integer"):
        settings.load(WorkerSettings)


def test_the_brokers_password_is_in_no_text_of_the_settings(env: pytest.MonkeyPatch) -> None:
    env.setenv("WARREN_BROKER", "amqp://user:hunter2@broker/")

    assert "hunter2" not in f"{settings.load(WorkerSettings)!r}"


@pytest.mark.parametrize("secret", ["", "changeme", "x" * 31])
def test_a_short_secret_stops_the_start(env: pytest.MonkeyPatch, secret: str) -> None:
    env.setenv("WARREN_SECRET", secret)

    with pytest.raises(StartupError, match="WARREN_SECRET: the secret must have at least 32 bytes"):
        settings.load(GatewaySettings)


def test_secrets_are_read_from_files(env: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "broker").write_text("amqp://user:hunter2@broker/\n")
    (tmp_path / "secret").write_text("x" * 32 + "\n")
    env.setenv("WARREN_BROKER", f"file:{tmp_path}/broker")

    loaded = settings.load(GatewaySettings, secret=f"file:{tmp_path}/secret")

    assert loaded.broker is not None
    assert loaded.broker.get_secret_value() == "amqp://user:hunter2@broker/"
    assert loaded.secret is not None
    assert loaded.secret.get_secret_value() == "x" * 32


def test_a_missing_secret_file_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"--secret: .* No such file"):
        settings.load(GatewaySettings, secret=f"file:{tmp_path}/secret")


@pytest.mark.parametrize("side", [GatewaySettings, WorkerSettings])
def test_the_help_of_every_number_says_when_to_change_it(side: type[CommonSettings]) -> None:
    """An operator asks this of every limit and every time."""
    numbers = {
        name: field.description or ""
        for name, field in side.model_fields.items()
        if isinstance(field.default, int | float) and not isinstance(field.default, bool)
    }

    silent = [name for name, help_ in numbers.items() if not _ADVICE.search(help_)]

    assert len(numbers) > 5
    assert set(silent) <= {"port"}


@pytest.mark.parametrize("cls", [GatewaySettings, WorkerSettings])
def test_every_secret_may_be_in_a_file(cls: type[CommonSettings], tmp_path: Path) -> None:
    secrets = [name for name, field in cls.model_fields.items() if "Secret" in str(field)]
    (tmp_path / "secret").write_text("s" * 32)

    loaded = settings.load(cls, **dict.fromkeys(secrets, f"file:{tmp_path}/secret"))

    assert secrets
    assert all(getattr(loaded, name).get_secret_value() == "s" * 32 for name in secrets)


def test_an_error_names_the_option_that_was_typed_or_else_the_variable(
    env: pytest.MonkeyPatch,
) -> None:
    env.setenv("WARREN_DRAIN_GRACE_S", "soon")

    with pytest.raises(StartupError, match=r"^WARREN_DRAIN_GRACE_S: .*; --port: "):
        settings.load(GatewaySettings, port="many")


def test_a_misspelled_variable_is_guessed(env: pytest.MonkeyPatch) -> None:
    env.setenv("WARREN_MAX_REQUEST", "8")

    with pytest.raises(StartupError, match=r"did you mean WARREN_MAX_REQUESTS\?$"):
        settings.load(GatewaySettings)


@pytest.mark.parametrize("service", ["WARREN", "WARREN_GATEWAY", "WARREN_HEALTH"])
def test_variables_of_kubernetes_for_a_service_do_no_harm(
    env: pytest.MonkeyPatch, service: str
) -> None:
    address = "tcp://10.0.0.1:8000"
    for name, value in {
        "SERVICE_HOST": "10.0.0.1",
        "SERVICE_PORT": "8000",
        "SERVICE_PORT_HTTP": "8000",
        "PORT": address,
        "PORT_8000_TCP": address,
        "PORT_8000_TCP_PROTO": "tcp",
        "PORT_8000_TCP_PORT": "8000",
        "PORT_8000_TCP_ADDR": "10.0.0.1",
    }.items():
        env.setenv(f"{service}_{name}", value)

    assert settings.load(GatewaySettings).port == 8000
    assert settings.load(WorkerSettings).health_port is None
