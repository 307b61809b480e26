from collections.abc import Iterator

import pytest

from tests.distributed.harness import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Runs a function on several ranks."""
    server = Ranks()
    yield server
    server.close()
