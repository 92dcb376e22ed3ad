"""What a catalog exports."""

from shared.telemetry.metrics import Catalog


def test_what_is_read_at_a_scrape_has_its_labels() -> None:
    catalog = Catalog()
    catalog.at_scrape("gauge", "warren_test", "A test.", ("model",), lambda: [(("m",), 2)])

    assert 'warren_test{model="m"} 2.0' in catalog.render().decode()
    assert [described.name for described in catalog.descriptions] == ["warren_test"]
