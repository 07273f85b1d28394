"""What the parity tests share."""

import pytest
from model_case import References


@pytest.fixture(scope="session")
def references(tmp_path_factory) -> References:
    return References(tmp_path_factory.mktemp("references"))
