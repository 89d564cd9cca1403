"""Requests made from the OpenAPI document, valid and not: an answer or a refusal in shape, never a 500."""

import httpx
import pytest
from server import KEY, check_shape

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
from hypothesis import HealthCheck, Phase, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402


@pytest.fixture(scope="module")
def schema(guarded):
    return schemathesis.openapi.from_url(f"{guarded}/openapi.json", headers=KEY)


def sample(schema, url, examples):
    """Examples of each operation, valid ones and such that the document rules out."""
    modes = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)
    for result in schema.get_all_operations():
        operation = result.ok()

        @settings(
            max_examples=examples, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(st.one_of(*(operation.as_strategy(generation_mode=mode) for mode in modes)))
        def send(case):
            check_shape(case.call(base_url=url, headers=KEY, timeout=60), case.operation.path)

        send()


def test_a_sample_of_every_operation(schema, guarded):
    sample(schema, guarded, 4)
    assert httpx.get(f"{guarded}/health").status_code == 200


@pytest.mark.slow
def test_many_of_every_operation(schema, guarded):
    sample(schema, guarded, 150)
    assert httpx.get(f"{guarded}/health").status_code == 200
