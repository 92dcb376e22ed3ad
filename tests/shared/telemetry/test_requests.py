"""The bound on the number of tenants in labels."""

from shared.telemetry.metrics import Catalog
from shared.telemetry.requests import ANONYMOUS, OTHER, TenantLabels


def test_tenants_beyond_the_bound_are_counted_as_others() -> None:
    labels = TenantLabels(2, lambda _tenant: None)

    given = [labels.label(tenant) for tenant in ("a", "a", "b", "b", "c", "")]

    assert given == ["a", "a", "b", "b", OTHER, ANONYMOUS]


def test_a_tenant_with_more_requests_displaces_the_one_with_the_fewest() -> None:
    catalog = Catalog()
    counter = catalog.counter("warren_test_total", "A test.", "tenant")
    labels = TenantLabels(2, catalog.forget_tenant)

    for tenant in ("a", "a", "a", "b", "c", "c"):
        counter.labels(labels.label(tenant)).inc()

    exported = catalog.render().decode()
    assert 'warren_test_total{tenant="a"} 3.0' in exported
    assert 'warren_test_total{tenant="c"} 1.0' in exported
    assert f'warren_test_total{{tenant="{OTHER}"}} 1.0' in exported
    assert 'tenant="b"' not in exported


def test_the_number_of_labels_stays_bounded_whatever_comes() -> None:
    seen: set[str] = set()
    labels = TenantLabels(3, seen.discard)

    for number in range(5000):
        seen.add(labels.label(f"tenant-{number % 700}"))

    assert len(seen - {OTHER}) <= 3


def test_without_tenants_of_their_own_all_are_others() -> None:
    assert TenantLabels(0, lambda _tenant: None).label("a") == OTHER
