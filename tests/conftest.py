"""Which tests run: the slow ones with --all, those for an accelerator where there is one."""

import pytest

from rlhf.distributed import device_type


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the slow tests too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    run_slow, has_accelerator = config.getoption("--all"), device_type() != "cpu"
    for item in items:
        if item.get_closest_marker("slow") and not run_slow:
            item.add_marker(pytest.mark.skip(reason="slow: run with --all"))
        if item.get_closest_marker("gpu") and not has_accelerator:
            item.add_marker(pytest.mark.skip(reason="no accelerator on this machine"))
