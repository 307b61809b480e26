"""Which tests run: the slow ones with --all, those for an accelerator where there is one. Emulated hosts."""

from collections.abc import Iterator

import pytest

from rlhf.distributed import device_type
from tests import hosts as emulated


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the slow tests too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    run_slow, has_accelerator = config.getoption("--all"), device_type() != "cpu"
    for item in items:
        if item.get_closest_marker("slow") and not run_slow:
            item.add_marker(pytest.mark.skip(reason="slow: run with --all"))
        if item.get_closest_marker("gpu") and not has_accelerator:
            item.add_marker(pytest.mark.skip(reason="no accelerator on this machine"))


@pytest.fixture(scope="module")
def two_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[emulated.Hosts]:
    """Two emulated machines with ssh between them; a test that breaks one makes its own."""
    reason = emulated.lacking("pdsh", "ip")
    if reason:
        pytest.skip(reason)
    with emulated.namespaces(tmp_path_factory.mktemp("hosts")) as hosts:
        yield hosts
